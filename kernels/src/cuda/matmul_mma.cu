// Matrix products on tensor cores, for where cuBLASLt is missing: those of matmul.cu, by the same parameters.
//
//   matmul_mma_nt   out[m, n] = Σ_l a[m, l] · b[n, l] + bias[n] + residual[m, n]
//   matmul_mma_nn   out[m, n] = Σ_l a[m, l] · b[l, n] + bias[n] + residual[m, n]
//   matmul_mma_tn   out[m, n] = Σ_l a[l, m] · b[l, n] + bias[n] + residual[m, n]
//
// a and b have one dtype, bf16 or f16, begin at multiples of 16 bytes, and their rows (l, l; l, n; m, n elements long) are
// multiples of 8; the rest is for matmul_plain. All other sizes are free. out has any dtype and begins at a multiple of 8;
// bias and residual have that of out and begin anywhere. (Dtypes of their own would be branches at each of 64 unrolled sums,
// and three times the time of the compiler.)
//
// FLOPs: 2·m·n·l. Bytes from the L2 cache: each operand once per 128 rows or columns of the other.
//
// A block of 256 threads computes 128 × 128 outputs, each of its eight warps 64 × 32, from slabs of 32 inner indices. Slabs
// arrive by asynchronous copies, STAGES − 1 of them ahead of the one in use: STAGES · 16 KiB of shared memory (49152 bytes),
// so that two blocks fit on every card; 128 registers a thread for the same reason, 64 of them sums. A slab holds an operand
// as it is stored, 128 rows of 32 or 32 rows of 128; ldmatrix transposes where the inner index goes down.
//
// Order of sums: l ascending, in f32, within 16 that of the hardware. Tiles are taken in groups of eight rows of tiles, down
// each column of a group: blocks that run together share operands in the L2 cache.
//
// Compiled for sm_80 to sm_120; run emulated and on an H200 (sm_90).

#define SIDE 128
#define SLAB 32
#define STAGES 3
#define THREADS 256
#define SLAB_ELEMENTS (SIDE * SLAB)
// Tiles of 16 rows and of 8 columns that a warp has.
#define STACK 4
#define COLUMNS 4
#define ROWS_OF_TILES 8

// An operand with `outers` outer indices (rows of out, or columns) and `inners` inner ones. INNER_LAST: stored
// [outers, inners], else [inners, outers].
struct Operand {
    const u16 *from;
    i64 outers, inners;
};

// Starts to copy a slab of 128 outer and 32 inner indices; zeros beyond the ends, which lie between chunks.
template <bool INNER_LAST> __device__ __forceinline__ void copy_slab(u16 *slab, const Operand &operand, i64 outer, i64 inner) {
    constexpr int WIDTH = INNER_LAST ? SLAB : SIDE, CHUNKS = WIDTH / 8;
    i64 row_first = INNER_LAST ? outer : inner, column_first = INNER_LAST ? inner : outer;
    i64 rows = INNER_LAST ? operand.outers : operand.inners, columns = INNER_LAST ? operand.inners : operand.outers;
    int chunk = threadIdx.x % CHUNKS;
    i64 column = column_first + chunk * 8;
#pragma unroll
    for (int above = 0; above < SLAB_ELEMENTS / WIDTH; above += THREADS / CHUNKS) {
        int r = above + threadIdx.x / CHUNKS;
        bool valid = row_first + r < rows && column < columns;
        cp_async_16(slab + swizzled<WIDTH>(r, chunk), operand.from + (valid ? (row_first + r) * columns + column : 0), valid);
    }
}

// The a of 16 outer indices from `outer` on and 16 inner ones from `inner` on.
template <bool INNER_LAST> __device__ __forceinline__ void load_a(u32 registers[4], const u16 *slab, int outer, int inner) {
    if (INNER_LAST) {
        ldmatrix_x4(registers, slab + outer * SLAB + (lane_down<SLAB>() ^ inner));
    } else {
        ldmatrix_x4_trans(registers, slab + inner * SIDE + (lane_across<SIDE>() ^ outer));
    }
}

// Two b of 8 outer indices each.
template <bool INNER_LAST> __device__ __forceinline__ void load_b(u32 registers[4], const u16 *slab, int outer, int inner) {
    if (INNER_LAST) {
        ldmatrix_x4(registers, slab + outer * SLAB + (lane_across<SLAB>() ^ inner));
    } else {
        ldmatrix_x4_trans(registers, slab + inner * SIDE + (lane_down<SIDE>() ^ outer));
    }
}

template <int DTYPE>
__device__ __forceinline__ void store_sums(void *out, const void *bias, const void *residual, i64 row, i64 column, i64 m, i64 n,
                                           float sums[STACK][COLUMNS][4]) {
    int lane = threadIdx.x % 32;
    if (bias) {
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            i64 c = column + 8 * j + lane % 4 * 2;
            float first = c < n ? load(bias, DTYPE, c) : 0.0f, second = c + 1 < n ? load(bias, DTYPE, c + 1) : 0.0f;
#pragma unroll
            for (int i = 0; i < STACK; i++) {
                sums[i][j][0] += first, sums[i][j][1] += second;
                sums[i][j][2] += first, sums[i][j][3] += second;
            }
        }
    }
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 r = row + i * 16 + half * 8 + lane / 4;
            if (r >= m) continue;
#pragma unroll
            for (int j = 0; j < COLUMNS; j++) {
                i64 c = column + 8 * j + lane % 4 * 2, at = r * n + c;
                if (c >= n) continue;
                bool second = c + 1 < n;
                float x = sums[i][j][2 * half], y = sums[i][j][2 * half + 1];
                if (residual) {
                    x += load(residual, DTYPE, at);
                    if (second) y += load(residual, DTYPE, at + 1);
                }
                // Rows of an odd length do not begin at multiples of a pair.
                store_pair(out, DTYPE, at, x, y, n % 2 == 0);
                if (n % 2 != 0 && second) store(out, DTYPE, at + 1, y);
            }
        }
}

// The tile of a block.
__device__ __forceinline__ void find_tile(i64 m, i64 n, i64 &row, i64 &column) {
    i64 down = (m + SIDE - 1) / SIDE, across = (n + SIDE - 1) / SIDE, of_group = ROWS_OF_TILES * across;
    i64 group = blockIdx.x / of_group, in_group = blockIdx.x % of_group;
    i64 rows = min(down - group * ROWS_OF_TILES, (i64)ROWS_OF_TILES);
    row = (group * ROWS_OF_TILES + in_group % rows) * SIDE;
    column = in_group / rows * SIDE;
}

template <int DTYPE, bool A_INNER_LAST, bool B_INNER_LAST>
__device__ __forceinline__ void product(const Operand &a, const Operand &b, void *out, int out_dtype, const void *bias,
                                        const void *residual) {
    u16 *slabs = (u16 *)dynamic_shared;
    i64 row, column;
    find_tile(a.outers, b.outers, row, column);
    int warp = threadIdx.x / 32, warp_row = warp % 2 * 16 * STACK, warp_column = warp / 2 * 8 * COLUMNS;
    i64 inner_end = a.inners, next = 0;
    int next_stage = 0;
    // Each call ends a group, with or without copies, so that groups count slabs.
    auto copy_next = [&]() {
        if (next < inner_end) {
            copy_slab<A_INNER_LAST>(slabs + next_stage * 2 * SLAB_ELEMENTS, a, row, next);
            copy_slab<B_INNER_LAST>(slabs + (next_stage * 2 + 1) * SLAB_ELEMENTS, b, column, next);
        }
        cp_async_commit();
        next += SLAB;
        next_stage = next_stage + 1 == STAGES ? 0 : next_stage + 1;
    };
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) copy_next();

    float sums[STACK][COLUMNS][4] = {};
    int stage = 0;
    for (i64 inner = 0; inner < inner_end; inner += SLAB) {
        // This slab is there, and everybody is done with the last one, whose place the next takes.
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        copy_next();
        const u16 *a_slab = slabs + stage * 2 * SLAB_ELEMENTS, *b_slab = a_slab + SLAB_ELEMENTS;
#pragma unroll
        for (int step = 0; step < SLAB; step += 16) {
            u32 left[STACK][4];
#pragma unroll
            for (int i = 0; i < STACK; i++) load_a<A_INNER_LAST>(left[i], a_slab, warp_row + 16 * i, step);
#pragma unroll
            for (int j = 0; j < COLUMNS; j += 2) {
                u32 right[4];
                load_b<B_INNER_LAST>(right, b_slab, warp_column + 8 * j, step);
                mma_pair<DTYPE, STACK, COLUMNS>(sums, j, left, right);
            }
        }
        stage = stage + 1 == STAGES ? 0 : stage + 1;
    }
    row += warp_row, column += warp_column;
    if (out_dtype == F32) {
        store_sums<F32>(out, bias, residual, row, column, a.outers, b.outers, sums);
    } else if (out_dtype == BF16) {
        store_sums<BF16>(out, bias, residual, row, column, a.outers, b.outers, sums);
    } else {
        store_sums<F16>(out, bias, residual, row, column, a.outers, b.outers, sums);
    }
}

// The parameters of matmul_plain, of which the dtypes of b, bias and residual and what is transposed are known here.
#define PARAMETERS                                                                                                     \
    const void *a, int a_dtype, int, const void *b, int, int, void *out, int out_dtype, const void *bias, int,             \
        const void *residual, int, i64 m, i64 n, i64 l
#define PRODUCT(A_INNER_LAST, B_INNER_LAST)                                                                            \
    Operand left = {(const u16 *)a, m, l}, right = {(const u16 *)b, n, l};                                             \
    if (a_dtype == BF16) {                                                                                             \
        product<BF16, A_INNER_LAST, B_INNER_LAST>(left, right, out, out_dtype, bias, residual);                        \
    } else {                                                                                                           \
        product<F16, A_INNER_LAST, B_INNER_LAST>(left, right, out, out_dtype, bias, residual);                         \
    }

extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul_mma_nt(PARAMETERS) { PRODUCT(true, true) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul_mma_nn(PARAMETERS) { PRODUCT(true, false) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) matmul_mma_tn(PARAMETERS) { PRODUCT(false, false) }
