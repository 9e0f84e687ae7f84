// Whether the shim's tensor-core instructions are those of the PTX manual: single instructions, with every lane's registers
// filled and read by the manual's tables and nothing of mma.cuh but the instructions, in one warp; and where its tiles lie.

// registers[4·lane + i]: register i of the lane. a [32][4], b [32][2] words; sums [32][4].
extern "C" __global__ void selftest_mma(const u32 *a, const u32 *b, float *sums, int dtype) {
    int lane = threadIdx.x;
    if (dtype == BF16) {
        mma_m16n8k16<BF16>(sums + 4 * lane, a + 4 * lane, b + 2 * lane);
    } else {
        mma_m16n8k16<F16>(sums + 4 * lane, a + 4 * lane, b + 2 * lane);
    }
}

// Four matrices of 8 rows of 8 elements, one after the other; registers [32][4].
extern "C" __global__ void selftest_ldmatrix(const u16 *matrices, u32 *registers, int trans) {
    __shared__ __align__(16) u16 rows[32][8];
    int lane = threadIdx.x;
    for (int i = 0; i < 8; i++) rows[lane][i] = matrices[8 * lane + i];
    __syncwarp();
    if (trans) {
        ldmatrix_x4_trans(registers + 4 * lane, rows[lane]);
    } else {
        ldmatrix_x4(registers + 4 * lane, rows[lane]);
    }
}

// Copies a chunk for each lane in each of two groups; `seen` [3][32][8] is what lies at the first group's destination after
// the copies were issued, after a wait that leaves one group, and at the second one's after a wait for all.
extern "C" __global__ void selftest_copies(const u16 *from, u16 *seen, int valid) {
    __shared__ __align__(16) u16 tile[2][32][8];
    int lane = threadIdx.x;
    for (int i = 0; i < 8; i++) tile[0][lane][i] = tile[1][lane][i] = 1;
    cp_async_16(tile[0][lane], from + 8 * lane, lane < valid);
    cp_async_commit();
    cp_async_16(tile[1][lane], from + 256 + 8 * lane, lane < valid);
    cp_async_commit();
    for (int i = 0; i < 8; i++) seen[8 * lane + i] = tile[0][lane][i];
    cp_async_wait<1>();
    for (int i = 0; i < 8; i++) seen[256 + 8 * lane + i] = tile[0][lane][i];
    cp_async_wait<0>();
    for (int i = 0; i < 8; i++) seen[512 + 8 * lane + i] = tile[1][lane][i];
}

// Places of the chunks of 8 rows, [8][width / 8].
extern "C" __global__ void selftest_swizzled(int *places, int width) {
    int chunks = width / 8, row = threadIdx.x / chunks, chunk = threadIdx.x % chunks;
    places[threadIdx.x] = width == 32    ? swizzled<32>(row, chunk)
                          : width == 64  ? swizzled<64>(row, chunk)
                                         : swizzled<128>(row, chunk);
}
