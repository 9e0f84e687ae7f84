// What every kernel file is compiled behind: NVRTC gets this text and the file's, one after the other.
//
// No header is included, since NVRTC has none without a toolkit. The same text is compiled by a C++ compiler behind
// kernels/shim, which defines TERRACE_SHIM; inline PTX stands under `#ifndef TERRACE_SHIM`.
//
// Conventions of all kernels:
//  - operands are dense and row-major; every float operand is followed by its dtype, so that any mix of f32, bf16 and
//    f16 needs one kernel only. The branch is the same for all threads, and loads move 16 bytes or more after it;
//  - elements are widened to f32, results rounded to nearest even once;
//  - a result depends on operands and shapes alone: sums are cut at places given by shapes, there are no float atomics,
//    and grids that are smaller than the work stride over it;
//  - blocks are one-dimensional, a multiple of 32 threads, unless a kernel says otherwise.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// Codes of `DType`; kernels/src/cuda/operand.rs has the same.
enum { F32 = 0, BF16 = 1, F16 = 2 };

#define ALL_LANES 0xFFFFFFFFu

// As many bytes as the launch asks for; the shim knows it by this name and type.
extern __shared__ __align__(16) unsigned char dynamic_shared[];

// ---- 16-bit floats --------------------------------------------------------------------------------------------------

__device__ __forceinline__ float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

// NaNs keep their sign and upper payload, made quiet.
__device__ __forceinline__ u32 float_to_bf16(float x) {
    u32 bits = __float_as_uint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return bits >> 16 | 0x40u;
    return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}

__device__ __forceinline__ float f16_to_float(u32 bits) {
#ifndef TERRACE_SHIM
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((u16)bits));
    return x;
#else
    u32 sign = (bits & 0x8000u) << 16, rest = bits & 0x7FFFu;
    if (rest >= 0x7C00u) return __uint_as_float(sign | 0x7F800000u | (rest & 0x3FFu) << 13);
    // Moved into place the exponent is 112 too small: 2^112 mends that, for subnormal numbers too.
    float x = __uint_as_float(rest << 13) * 5.192296858534828e33f;
    return __uint_as_float(sign | __float_as_uint(x));
#endif
}

__device__ __forceinline__ u32 float_to_f16(float x) {
#ifndef TERRACE_SHIM
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
#else
    u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, rest = bits & 0x7FFFFFFFu;
    if (rest > 0x7F800000u) return sign | 0x7E00u;
    if (rest >= 0x477FF000u) return sign | 0x7C00u;
    // Below 2^-14 the sum with 0.5 has its last place where a subnormal f16 has: the addition rounds.
    if (rest < 0x38800000u) return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - 0x3F000000u);
    return sign | (rest - 0x38000000u + 0xFFFu + (rest >> 13 & 1u)) >> 13;
#endif
}

// ---- loads and stores -----------------------------------------------------------------------------------------------

__device__ __forceinline__ float load(const void *from, int dtype, i64 i) {
    if (dtype == F32) return ((const float *)from)[i];
    u32 bits = ((const u16 *)from)[i];
    return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

__device__ __forceinline__ u32 to_half(float x, int dtype) { return dtype == BF16 ? float_to_bf16(x) : float_to_f16(x); }

__device__ __forceinline__ float from_half(u32 bits, int dtype) {
    return dtype == BF16 ? bf16_to_float(bits) : f16_to_float(bits);
}

__device__ __forceinline__ void store(void *to, int dtype, i64 i, float x) {
    if (dtype == F32) {
        ((float *)to)[i] = x;
    } else {
        ((u16 *)to)[i] = (u16)to_half(x, dtype);
    }
}

// Where the keys and values of a sequence lie: in a run of their own, or in pages of which a table of the sequence has the
// numbers.
struct Pages {
    // Null: no pages.
    const int *table;
    // Of a page's positions, which are a multiple of every tile's.
    int shift;

    // Whether there is a page for a position of sequence b, of `capacity` positions; where there is none keys and values are zeros.
    __device__ __forceinline__ bool there(int b, int capacity, int position) const {
        return !table || table[b * (capacity >> shift) + (position >> shift)] >= 0;
    }

    // What to add to such a position for its row among those of all sequences or pages; of any page where there is none. It
    // holds for all of a tile, which lies in one page.
    __device__ __forceinline__ int rows_before(int b, int capacity, int position) const {
        if (!table) return b * capacity;
        int of_sequence = position >> shift;
        return (max(table[b * (capacity >> shift) + of_sequence], 0) - of_sequence) << shift;
    }
};

// Whether eight elements from any multiple of eight on can be moved at once.
__device__ __forceinline__ bool aligned16(const void *at) { return ((u64)at & 15) == 0; }

// Elements i .. i + 8 of an aligned tensor; i is a multiple of 8.
__device__ __forceinline__ void load8(const void *from, int dtype, i64 i, float x[8]) {
    if (dtype == F32) {
        const float4 *at = (const float4 *)((const float *)from + i);
        float4 low = at[0], high = at[1];
        x[0] = low.x, x[1] = low.y, x[2] = low.z, x[3] = low.w;
        x[4] = high.x, x[5] = high.y, x[6] = high.z, x[7] = high.w;
        return;
    }
    uint4 bits = *(const uint4 *)((const u16 *)from + i);
    u32 words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
    for (int j = 0; j < 4; j++) {
        x[2 * j] = from_half(words[j] & 0xFFFFu, dtype);
        x[2 * j + 1] = from_half(words[j] >> 16, dtype);
    }
}

__device__ __forceinline__ void store8(void *to, int dtype, i64 i, const float x[8]) {
    if (dtype == F32) {
        float4 *at = (float4 *)((float *)to + i);
        at[0] = make_float4(x[0], x[1], x[2], x[3]);
        at[1] = make_float4(x[4], x[5], x[6], x[7]);
        return;
    }
    u32 words[4];
#pragma unroll
    for (int j = 0; j < 4; j++) words[j] = to_half(x[2 * j], dtype) | to_half(x[2 * j + 1], dtype) << 16;
    *(uint4 *)((u16 *)to + i) = make_uint4(words[0], words[1], words[2], words[3]);
}

// Elements i .. i + count of a row, zero beyond; `vector`: all eight may be moved at once if there are eight.
__device__ __forceinline__ void load8_or_less(const void *from, int dtype, i64 i, int count, bool vector, float x[8]) {
    if (vector && count >= 8) {
        load8(from, dtype, i, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++) x[j] = j < count ? load(from, dtype, i + j) : 0.0f;
}

__device__ __forceinline__ void store8_or_less(void *to, int dtype, i64 i, int count, bool vector, const float x[8]) {
    if (vector && count >= 8) {
        store8(to, dtype, i, x);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (j < count) store(to, dtype, i + j, x[j]);
}

// ---- what is added to a product ------------------------------------------------------------------------------------

// A bias [n] and a residual [m, n], either of which may be missing (null). The residual may be what is written: each element
// is read by the thread that writes it, before.
struct Epilogue {
    const void *bias;
    int bias_dtype;
    const void *residual;
    int residual_dtype;
};

// The element at `i` of the result, in column `c`.
__device__ __forceinline__ float finished(const Epilogue &epilogue, i64 i, i64 c, float sum) {
    if (epilogue.bias) sum += load(epilogue.bias, epilogue.bias_dtype, c);
    if (epilogue.residual) sum += load(epilogue.residual, epilogue.residual_dtype, i);
    return sum;
}

// ---- sums over threads, always in the same order --------------------------------------------------------------------

template <typename T> __device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

// The sum over a block, for every thread. `warps` is shared and has 33 elements; a call may follow another at once.
template <typename T> __device__ __forceinline__ T block_sum(T x, T *warps) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = x;
    __syncthreads();
    if (threadIdx.x < 32) {
        T sum = warp_sum(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : T(0));
        if (threadIdx.x == 0) warps[32] = sum;
    }
    __syncthreads();
    return warps[32];
}

// out[c] += Σ_r term(r, r·width + c), for a block of 1024 threads and a grid over 32 columns each.
//
// Thread (y, x) adds rows y, y + 32, … of column x; the 32 sums of a column are then added in the order of y, and last the
// old value. A row gives 32 neighbouring elements at a time, which is whole sectors of memory for every dtype. Cutting
// the rows over blocks as well would need memory for partial sums; without it width/32 blocks are busy.
template <typename Term> __device__ __forceinline__ void sum_columns(i64 rows, i64 width, float *out, Term term) {
    __shared__ float sums[32][33];
    int x = threadIdx.x % 32, y = threadIdx.x / 32;
    for (i64 first = (i64)blockIdx.x * 32; first < width; first += (i64)gridDim.x * 32) {
        i64 column = first + x;
        float sum = 0.0f;
        if (column < width)
            for (i64 row = y; row < rows; row += 32) sum += term(row, row * width + column);
        sums[y][x] = sum;
        __syncthreads();
        if (y == 0 && column < width) {
            float total = sums[0][x];
            for (int i = 1; i < 32; i++) total += sums[i][x];
            out[column] += total;
        }
        __syncthreads();
    }
}

// total[0] += Σ_i terms[i], i ascending, by one block of 256 threads.
__device__ __forceinline__ void add_in_order(const double *terms, i64 count, double *total) {
    __shared__ double stretch[256];
    double sum = total[0];
    for (i64 start = 0; start < count; start += 256) {
        if (start + threadIdx.x < count) stretch[threadIdx.x] = terms[start + threadIdx.x];
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < 256 && start + i < count; i++) sum += stretch[i];
        __syncthreads();
    }
    if (threadIdx.x == 0) total[0] = sum;
}

// ---- what queries see -----------------------------------------------------------------------------------------------

// A query sees keys from the first one to its own position. `sight` > 0: the last so many; at least as many as there are keys
// when there is no window. `sight` < 0: those of its chunk of −sight positions, which has run emulated alone.

__device__ __forceinline__ int first_key(int position, int sight) {
    return sight > 0 ? position - sight + 1 : position / -sight * -sight;
}

// The last query that sees a key.
__device__ __forceinline__ i64 last_query(int key, int sight) {
    return sight > 0 ? (i64)key + sight - 1 : ((i64)key / -sight + 1) * -sight - 1;
}

// ---- products of tiles ----------------------------------------------------------------------------------------------

// A tile of a product is 64 × 64 and belongs to a block of 256 threads, 16 × 16 of them: thread (y, x) has rows
// 4y .. 4y + 4 and columns 4x .. 4x + 4. Operands lie in shared memory with the inner index first.
#define TILE 64
#define TILE_THREADS 256
// Elements from one inner index to the next: a multiple of four floats, and rows begin at different banks.
#define TILE_STRIDE 68

// sums[i][j] += Σ_d a[d][4y + i] · b[d][4x + j], d ascending.
__device__ __forceinline__ void tile_product(float sums[4][4], const float *a, const float *b, int depth) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll 8
    for (int d = 0; d < depth; d++) {
        float4 rows = *(const float4 *)(a + d * TILE_STRIDE + 4 * y);
        float4 cols = *(const float4 *)(b + d * TILE_STRIDE + 4 * x);
        float r[4] = {rows.x, rows.y, rows.z, rows.w}, c[4] = {cols.x, cols.y, cols.z, cols.w};
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) sums[i][j] += r[i] * c[j];
    }
}
