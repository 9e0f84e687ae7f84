// Tensor cores, for the kernel files whose names end in `_mma`: they get this text after that of common.cuh.
//
// Instructions of sm_80 that later generations have too (PTX ISA 7.0: mma, ldmatrix, cp.async), each in inline PTX and,
// behind kernels/shim, emulated lane by lane.
//
// Fragments of mma.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16 with floating point type"), for lane 4·g + t:
//
//   a   four registers of two elements: rows g and g + 8, columns 2t and 2t + 1; then the same 8 columns further
//   b   two registers: rows 2t and 2t + 1, column g; then the same 8 rows further
//   sum four floats: row g, columns 2t and 2t + 1; then row g + 8
//
// So two neighbouring sums, rounded, are an a: a product's result is the next product's left side without leaving the
// registers (`halves_of_sums`).
//
// Tiles in shared memory are rows of WIDTH 16-bit elements without padding, moved in chunks of eight elements. A chunk's
// place in its row is its index XOR the row (`swizzled`), so that eight rows of one chunk lie in all 32 banks: ldmatrix,
// with eight rows in each of its four steps, and copies of whole rows have no bank conflicts.

// ---- instructions ---------------------------------------------------------------------------------------------------

// sums += a·b. DTYPE: BF16 or F16.
template <int DTYPE> __device__ __forceinline__ void mma_m16n8k16(float sums[4], const u32 a[4], const u32 b[2]) {
#ifdef TERRACE_SHIM
    terrace_shim::mma_m16n8k16<DTYPE == F16>(sums, a, b, sums);
#else
    if (DTYPE == BF16) {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    } else {
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                     "{%0, %1, %2, %3};"
                     : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#endif
}

// Four matrices of 8 × 8 elements: lane 8·i + j gives the address of row j of matrix i, registers[i] becomes the lane's
// part of matrix i.
__device__ __forceinline__ void ldmatrix_x4(u32 registers[4], const u16 *row) {
#ifdef TERRACE_SHIM
    terrace_shim::ldmatrix<4, false>(registers, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// The same, and every matrix transposed.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 registers[4], const u16 *row) {
#ifdef TERRACE_SHIM
    terrace_shim::ldmatrix<4, true>(registers, row);
#else
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#endif
}

// Starts a copy of 16 bytes to shared memory, past the first-level cache; zeros if not `valid`, and `from` is not read.
__device__ __forceinline__ void cp_async_16(u16 *to, const u16 *from, bool valid) {
#ifdef TERRACE_SHIM
    terrace_shim::copy_async(to, from, 16, valid ? 16 : 0);
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((u32)__cvta_generic_to_shared(to)), "l"(__cvta_generic_to_global(from)), "r"(valid ? 16 : 0)
                 : "memory");
#endif
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void cp_async_commit() {
#ifdef TERRACE_SHIM
    terrace_shim::copy_commit();
#else
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif
}

// Waits until all but the last GROUPS of this thread's groups are there; other threads' copies need a barrier besides.
template <int GROUPS> __device__ __forceinline__ void cp_async_wait() {
#ifdef TERRACE_SHIM
    terrace_shim::copy_wait(GROUPS);
#else
    asm volatile("cp.async.wait_group %0;" : : "n"(GROUPS) : "memory");
#endif
}

// 2^x within two units in the last place; results below 2^-126 are zero.
__device__ __forceinline__ float exp2_approximate(float x) {
#ifdef TERRACE_SHIM
    return exp2f(x);
#else
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
#endif
}

// Two elements of one register, rounded to nearest even.
template <int DTYPE> __device__ __forceinline__ u32 halves(float low, float high) {
#ifdef TERRACE_SHIM
    return to_half(low, DTYPE) | to_half(high, DTYPE) << 16;
#else
    u32 bits;
    if (DTYPE == BF16) {
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(high), "f"(low));
    }
    return bits;
#endif
}

// x·y + z of both elements of registers, each rounded once to nearest even.
template <int DTYPE> __device__ __forceinline__ u32 fma_halves(u32 x, u32 y, u32 z) {
#ifdef TERRACE_SHIM
    u32 bits = 0;
    for (int shift = 0; shift < 32; shift += 16) {
        float of[3] = {from_half(x >> shift & 0xFFFFu, DTYPE), from_half(y >> shift & 0xFFFFu, DTYPE),
                       from_half(z >> shift & 0xFFFFu, DTYPE)};
        bits |= to_half(fmaf(of[0], of[1], of[2]), DTYPE) << shift;
    }
    return bits;
#else
    u32 bits;
    if (DTYPE == BF16) {
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(x), "r"(y), "r"(z));
    } else {
        asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(bits) : "r"(x), "r"(y), "r"(z));
    }
    return bits;
#endif
}

// ---- tiles ----------------------------------------------------------------------------------------------------------

// Where a chunk of eight elements lies. Rows of 32 elements are half a line of banks, so pairs of them are told apart.
template <int WIDTH> __device__ __forceinline__ int swizzled(int row, int chunk) {
    return row * WIDTH + (chunk ^ (WIDTH == 32 ? row >> 1 & 3 : row & 7)) * 8;
}

// A lane's address in a piece of 16 × 16 elements whose corner is at a row that is a multiple of 8. Column `c` of the tile,
// a multiple of 16, is reached by XOR with c, a row by adding multiples of WIDTH: the addresses of a whole tile differ by
// constants.
//
// `down`: matrices 0 and 1 are below each other. That is an a as it is stored, and two b from rows of k, transposed.
template <int WIDTH> __device__ __forceinline__ int lane_down() {
    int lane = threadIdx.x % 32;
    return swizzled<WIDTH>(lane % 16, lane / 16);
}

// `across`: matrices 0 and 1 are beside each other. That is two b from rows of n, and an a from rows of k, transposed.
template <int WIDTH> __device__ __forceinline__ int lane_across() {
    int lane = threadIdx.x % 32;
    return swizzled<WIDTH>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
}

// The a of columns 16·step .. 16·step + 16 from sums of 8 columns each.
template <int DTYPE, int COLUMNS>
__device__ __forceinline__ void halves_of_sums(u32 a[4], const float sums[COLUMNS][4], int step) {
    a[0] = halves<DTYPE>(sums[2 * step][0], sums[2 * step][1]);
    a[1] = halves<DTYPE>(sums[2 * step][2], sums[2 * step][3]);
    a[2] = halves<DTYPE>(sums[2 * step + 1][0], sums[2 * step + 1][1]);
    a[3] = halves<DTYPE>(sums[2 * step + 1][2], sums[2 * step + 1][3]);
}

// sums[i][n] += a[i]·b, for an `a` of 16·STACK rows and a `b` of two neighbouring tiles of 8 columns.
template <int DTYPE, int STACK, int COLUMNS>
__device__ __forceinline__ void mma_pair(float sums[STACK][COLUMNS][4], int n, const u32 a[STACK][4], const u32 b[4]) {
#pragma unroll
    for (int i = 0; i < STACK; i++) {
        mma_m16n8k16<DTYPE>(sums[i][n], a[i], b);
        mma_m16n8k16<DTYPE>(sums[i][n + 1], a[i], b + 2);
    }
}

// Two neighbouring elements; `pair`: both exist, and they may be moved at once.
__device__ __forceinline__ void store_pair(void *to, int dtype, i64 i, float x, float y, bool pair) {
    if (!pair) {
        store(to, dtype, i, x);
    } else if (dtype == F32) {
        *(float2 *)((float *)to + i) = make_float2(x, y);
    } else {
        *(u32 *)((u16 *)to + i) = dtype == BF16 ? halves<BF16>(x, y) : halves<F16>(x, y);
    }
}
