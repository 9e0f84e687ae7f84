// Products of 16-bit activations with a quantized matrix on tensor cores: those of quantized.cu, by the same parameters.
//
//   quantized_mma_8, _16, _32   so many rows of a and 16 columns a block, whose warps share the inner indices
//   quantized_mma_many          for many rows: 32 rows and 64 columns a block
//
// a is bf16 or f16, begins at a multiple of 16 bytes, and its rows are multiples of 8; w begins at a multiple of 8. The rest is for
// quantized_thin and quantized_tile. out, bias and residual have any dtype and begin anywhere.
//
// Codes are whole numbers up to 127, exact in either dtype, so that tensor cores multiply them as they are: a group of 32 weights
// is two steps of 16, whose sum is then scaled and added in f32. Nothing is rounded but sums; a·q may overflow where a is beyond 2^116.
//
// FLOPs: 2·m·n·l. Bytes: the codes once per tile of rows, a once per 16 columns (quantized_mma_many: 64) from the caches.
//
// A warp has 8 columns and all rows of its block. Fragments of a and b have the inner indices in an order that lets a lane read its
// part of a group in one piece: what meets in a step need only be the same in both. For lane 4·g + t, of column or row g, in terms of
// weights of a group:
//
//   int8   8t .. 8t + 8: eight bytes of codes, sixteen of a. Step s has weights 8t + 4s .. 8t + 4s + 4.
//   else   words 4t .. 4t + 4, which have weights i and i + 16 of every group, i = 4t .. 4t + 4: sixteen bytes for all of a block.
//          Step s has i = 4t + 2s and 4t + 2s + 1.
//
// A warp has the codes of DEPTH blocks in registers or on their way, since a load takes longer than computing one. Which registers a block is in
// is known when this is compiled: moving them would wait for what is on its way.
//
// Order of sums: within a group that of the hardware, blocks that a warp has ascending (every fourth one of few rows), then warps. A
// row of a changes no other's result.
//
// Compiled for sm_80 to sm_120 and run emulated; no card has run it.

enum { INT8 = 0, INT4 = 1, MXFP4 = 2 };

#define BLOCK 128
#define GROUP 32
#define GROUPS 4
#define SCALE_BYTES 8
#define THREADS 256
#define WARPS 8

// What a lane needs of a block of weights.
template <int FORMAT> struct Codes {
    // int8: of every group; else of all.
    uint2 words[FORMAT == INT8 ? GROUPS : 2];
    // Of the two columns of which the lane has sums: four bf16 each.
    uint2 scales[2];
};

template <int FORMAT> __device__ __forceinline__ constexpr int block_bytes() {
    return SCALE_BYTES + (FORMAT == INT8 ? BLOCK : BLOCK / 2);
}

template <int FORMAT>
__device__ __forceinline__ void load_codes(Codes<FORMAT> &codes, const u8 *row, const int of_sums[2], int block) {
    const u8 *at = row + block * block_bytes<FORMAT>();
    int t = threadIdx.x % 4;
    if (FORMAT == INT8) {
#pragma unroll
        for (int i = 0; i < GROUPS; i++) codes.words[i] = *(const uint2 *)(at + SCALE_BYTES + GROUP * i + 8 * t);
    } else {
#pragma unroll
        for (int i = 0; i < 2; i++) codes.words[i] = *(const uint2 *)(at + SCALE_BYTES + 16 * t + 8 * i);
    }
#pragma unroll
    for (int j = 0; j < 2; j++) codes.scales[j] = *(const uint2 *)(at + of_sums[j]);
}

// The codes of bytes `first` and `first` + 1, for `first` 0 or 2. A conversion from whole numbers would take as long as all else here.
template <int DTYPE> __device__ __forceinline__ u32 pair_of_bytes(u32 word, int first) {
    u32 bytes = __byte_perm(word, 0, first == 0 ? 0x4140 : 0x4342);
    // 128 + the lowest seven bits, minus 128 + the sign's 128.
    if (DTYPE == BF16) return fma_halves<BF16>((bytes & 0x00800080u) | 0x43004300u, 0xBF80BF80u, (bytes & 0x007F007Fu) | 0x43004300u);
    // 1024 + (q + 128), minus 1152.
    return fma_halves<F16>((bytes ^ 0x00800080u) | 0x64006400u, 0x3C003C00u, 0xE480E480u);
}

// Codes from the lowest four bits of either half of `word`.
template <int DTYPE, int FORMAT> __device__ __forceinline__ u32 pair_of_nibbles(u32 word) {
    if (FORMAT == MXFP4) {
        // Sign, exponent and mantissa where the dtype has its own, of which they are the end of the exponent and the beginning of the
        // mantissa: the number times 2^-126 or 2^-14, the smallest ones below the normal numbers as they are here. Then twice it.
        u32 signs = (word & 0x00080008u) << 12;
        if (DTYPE == BF16) return fma_halves<BF16>((word & 0x00070007u) << 6 | signs, 0x7F007F00u, 0u);
        return fma_halves<F16>((word & 0x00070007u) << 9 | signs, 0x78007800u, 0u);
    }
    // 128 + (q + 8) in bf16, 1024 + (q + 8) in f16; then minus 136 or 1032, as a multiplication by one and an addition.
    u32 bits = word & 0x000F000Fu;
    if (DTYPE == BF16) return fma_halves<BF16>(bits | 0x43004300u, 0x3F803F80u, 0xC308C308u);
    return fma_halves<F16>(bits | 0x64006400u, 0x3C003C00u, 0xE408E408u);
}

// The two b of a group.
template <int DTYPE, int FORMAT>
__device__ __forceinline__ void group_of_codes(u32 b[2][2], const Codes<FORMAT> &codes, int group) {
    if (FORMAT == INT8) {
        uint2 eight = codes.words[group];
        b[0][0] = pair_of_bytes<DTYPE>(eight.x, 0), b[0][1] = pair_of_bytes<DTYPE>(eight.x, 2);
        b[1][0] = pair_of_bytes<DTYPE>(eight.y, 0), b[1][1] = pair_of_bytes<DTYPE>(eight.y, 2);
    } else {
#pragma unroll
        for (int step = 0; step < 2; step++) {
            b[step][0] = pair_of_nibbles<DTYPE, FORMAT>(codes.words[step].x >> 4 * group);
            b[step][1] = pair_of_nibbles<DTYPE, FORMAT>(codes.words[step].y >> 4 * group);
        }
    }
}

// A row of a for both steps of a group, from the lane's first element on. `left`: elements from there to the row's end, beyond which are
// zeros. Loads are of addresses that are always there, so that none is behind a branch: `row` is where the row begins.
template <int FORMAT> __device__ __forceinline__ void load_row(u32 a[2][2], const u16 *row, int from, int left) {
    if (FORMAT == INT8) {
        uint4 eight = *(const uint4 *)(row + (left > 0 ? from : 0));
        u32 mask = left > 0 ? ~0u : 0u;
        a[0][0] = eight.x & mask, a[0][1] = eight.y & mask, a[1][0] = eight.z & mask, a[1][1] = eight.w & mask;
    } else {
        uint2 low = *(const uint2 *)(row + (left > 0 ? from : 0)), high = *(const uint2 *)(row + (left > 16 ? from + 16 : 0));
        u32 of_low = left > 0 ? ~0u : 0u, of_high = left > 16 ? ~0u : 0u;
        low.x &= of_low, low.y &= of_low, high.x &= of_high, high.y &= of_high;
        a[0][0] = (low.x & 0xFFFFu) | high.x << 16, a[0][1] = low.x >> 16 | (high.x & 0xFFFF0000u);
        a[1][0] = (low.y & 0xFFFFu) | high.y << 16, a[1][1] = low.y >> 16 | (high.y & 0xFFFF0000u);
    }
}

// The bf16 of a group, widened.
__device__ __forceinline__ float scale_of(uint2 four, int group) {
    u32 two = group < 2 ? four.x : four.y;
    return __uint_as_float(group % 2 ? two & 0xFFFF0000u : two << 16);
}

// Adds the products of a block of weights, for rows at `a_rows` from element `first` on.
template <int DTYPE, int FORMAT, int STACK, int HALVES>
__device__ __forceinline__ void add_block(float sums[STACK][2 * HALVES], const Codes<FORMAT> &codes,
                                          const u16 *const a_rows[STACK * HALVES], int first, int length) {
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        u32 b[2][2];
        group_of_codes<DTYPE>(b, codes, group);
        float scales[2] = {scale_of(codes.scales[0], group), scale_of(codes.scales[1], group)};
        int from = first + group * GROUP;
#pragma unroll
        for (int i = 0; i < STACK; i++) {
            u32 rows[2][2][2] = {};
#pragma unroll
            for (int half = 0; half < HALVES; half++)
                load_row<FORMAT>(rows[half], a_rows[i * HALVES + half], from, length - from);
            float of_group[4] = {};
#pragma unroll
            for (int step = 0; step < 2; step++) {
                u32 of_a[4] = {rows[0][step][0], rows[1][step][0], rows[0][step][1], rows[1][step][1]};
                mma_m16n8k16<DTYPE>(of_group, of_a, b[step]);
            }
#pragma unroll
            for (int j = 0; j < 2 * HALVES; j++) sums[i][j] += scales[j % 2] * of_group[j];
        }
    }
}

// What the threads of a block have: rows, in STACK tiles of 16, of which the upper halves are left out if there are 8 at most; WARPS /
// SHARERS times 8 columns.
template <int DTYPE, int FORMAT, int STACK, bool HAS_UPPER, int SHARERS, int DEPTH>
__device__ __forceinline__ void product(const u16 *a, const u8 *w, void *out, int out_dtype, const Epilogue &epilogue, i64 m, i64 n,
                                        i64 l) {
    constexpr int HALVES = HAS_UPPER ? 2 : 1;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    int sharer = warp % SHARERS;
    i64 column = ((i64)blockIdx.y * (WARPS / SHARERS) + warp / SHARERS) * 8, row = (i64)blockIdx.x * (16 * STACK) + g;
    int length = (int)l, blocks = (length + BLOCK - 1) / BLOCK;
    int row_bytes = blocks * block_bytes<FORMAT>(), last = (int)min(n - 1 - column, (i64)7);
    const u8 *codes_row = w + (column + min(g, last)) * row_bytes;
    // From there to the rows of the two columns of which the lane has sums.
    int of_sums[2];
#pragma unroll
    for (int j = 0; j < 2; j++) of_sums[j] = (min(2 * t + j, last) - min(g, last)) * row_bytes;
    int first = (FORMAT == INT8 ? 8 : 4) * t;
    // A row that is not there is the last one, whose sums nobody stores twice.
    const u16 *a_rows[STACK * HALVES];
#pragma unroll
    for (int i = 0; i < STACK * HALVES; i++) a_rows[i] = a + min(row + 16 / HALVES * i, m - 1) * l;

    Codes<FORMAT> ring[DEPTH];
#pragma unroll
    for (int d = 0; d < DEPTH; d++) load_codes(ring[d], codes_row, of_sums, min(sharer + d * SHARERS, blocks - 1));
    float sums[STACK][2 * HALVES] = {};
#pragma unroll 1
    for (int block = sharer; block < blocks;) {
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            // The same for a whole warp.
            if (block >= blocks) continue;
            add_block<DTYPE, FORMAT, STACK, HALVES>(sums, ring[d], a_rows, block * BLOCK + first, length);
            load_codes(ring[d], codes_row, of_sums, min(block + DEPTH * SHARERS, blocks - 1));
            block += SHARERS;
        }
    }

    if (SHARERS > 1) {
        // Of every warp but the first of those that share columns: what a lane has, beside those of other lanes.
        constexpr int EACH = STACK * 2 * HALVES;
        float *others = (float *)dynamic_shared + warp / SHARERS * (SHARERS - 1) * EACH * 32 + lane;
        if (sharer > 0) {
#pragma unroll
            for (int i = 0; i < EACH; i++) others[((sharer - 1) * EACH + i) * 32] = sums[i / (2 * HALVES)][i % (2 * HALVES)];
        }
        __syncthreads();
        if (sharer > 0) return;
#pragma unroll
        for (int s = 0; s < SHARERS - 1; s++)
#pragma unroll
            for (int i = 0; i < EACH; i++) sums[i / (2 * HALVES)][i % (2 * HALVES)] += others[(s * EACH + i) * 32];
    }
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int j = 0; j < 2 * HALVES; j++) {
            i64 r = row + 16 * i + j / 2 * 8, c = column + 2 * t + j % 2, at = r * n + c;
            if (r < m && c < n) store(out, out_dtype, at, finished(epilogue, at, c, sums[i][j]));
        }
}

#define PARAMETERS                                                                                                     \
    const void *a, int a_dtype, const u8 *w, int format, void *out, int out_dtype, const void *bias, int bias_dtype,       \
        const void *residual, int residual_dtype, i64 m, i64 n, i64 l
#define PRODUCT_OF(DTYPE, ...)                                                                                         \
    if (format == INT8) {                                                                                              \
        product<DTYPE, INT8, __VA_ARGS__>(rows, w, out, out_dtype, epilogue, m, n, l);                                 \
    } else if (format == INT4) {                                                                                       \
        product<DTYPE, INT4, __VA_ARGS__>(rows, w, out, out_dtype, epilogue, m, n, l);                                 \
    } else {                                                                                                           \
        product<DTYPE, MXFP4, __VA_ARGS__>(rows, w, out, out_dtype, epilogue, m, n, l);                                \
    }
#define PRODUCT(...)                                                                                                   \
    Epilogue epilogue = {bias, bias_dtype, residual, residual_dtype};                                                  \
    const u16 *rows = (const u16 *)a;                                                                                  \
    if (a_dtype == BF16) {                                                                                             \
        PRODUCT_OF(BF16, __VA_ARGS__)                                                                                  \
    } else {                                                                                                           \
        PRODUCT_OF(F16, __VA_ARGS__)                                                                                   \
    }

// 256 threads. Grid: the rows in the name a block (8: 16, of which 8 are there; many: 32), so that blocks that run together share codes in the L2 cache; then
// 16 columns a block (many: 64). Shared: 2 · 3 · 32 floats for each sum of a lane, which has 2, 4 and 8: 1536, 3072 and 6144 bytes (many: none).
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantized_mma_8(PARAMETERS) { PRODUCT(1, false, 4, 4) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantized_mma_16(PARAMETERS) { PRODUCT(1, true, 4, 3) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantized_mma_32(PARAMETERS) { PRODUCT(2, true, 4, 2) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) quantized_mma_many(PARAMETERS) { PRODUCT(2, true, 1, 2) }
