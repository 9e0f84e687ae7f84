// Products with a quantized matrix, for operands that quantized_mma.cu does not take:
// out[m, n] = Σ_l a[m, l] · w[n, l] + bias[n] + residual[m, n]; the format of w is that of kernels/src/quantized.rs, bias and
// residual are as in matmul.cu.
//
//   quantized_thin   up to 8 rows of a: a warp for every output column
//   quantized_tile   any number of rows: tiles as in matmul.cu, whose slabs of w are dequantized on the way in
//
// FLOPs: 2·m·n·l, and a product for every weight that is dequantized: once in all in quantized_thin, once per 64 rows of
// a in quantized_tile. Bytes: the codes once per that often. Weights are exact in f32, sums are taken in f32.
//
// Order of sums. thin: lane t adds its four weights of every block of 128, blocks ascending, then lanes; the other rows
// of a change nothing. tile: l ascending.

enum { INT8 = 0, INT4 = 1, MXFP4 = 2 };

#define BLOCK 128
#define SCALE_BYTES 8
// Rows of a that `quantized_thin` takes, and columns of a that it keeps in shared memory at a time.
#define THIN_ROWS 8
#define THIN_COLUMNS 1024

__device__ __forceinline__ i64 block_bytes(int format) { return SCALE_BYTES + (format == INT8 ? BLOCK : BLOCK / 2); }

// q of a code in the lowest four bits, in int4 and mxfp4: there the lower three are the place in a list, the fourth is the sign.
__device__ __forceinline__ float of_nibble(int format, u32 bits) {
    if (format == INT4) return (float)((int)(bits & 0xFu) - 8);
    int size = (int)(0xC8643210u >> 4 * (bits & 7u) & 0xFu);
    return (float)(bits & 8u ? -size : size);
}

// The four weights of a block that lane t of a warp takes. int8: 4t .. 4t + 4, of one group. Else word t/2 has weights
// i + 16h + 32g; lane t takes i = t/2, h = t % 2 and all four groups g.
__device__ __forceinline__ int lane_weight(int format, int lane, int j) {
    return format == INT8 ? 4 * lane + j : lane / 2 + 16 * (lane % 2) + 32 * j;
}

// Blocks are multiples of 8 bytes, rows begin at any block, and the matrix at any multiple of 8.
__device__ __forceinline__ void lane_weights(const u8 *block, int format, int lane, float w[4]) {
    const u32 *words = (const u32 *)block;
    u32 low = words[0], high = words[1];
    float scales[4] = {bf16_to_float(low & 0xFFFFu), bf16_to_float(low >> 16), bf16_to_float(high & 0xFFFFu),
                       bf16_to_float(high >> 16)};
    u32 codes = words[2 + (format == INT8 ? lane : lane / 2)];
    if (format == INT8) {
        // Chosen without indexing, which would put the scales into memory.
        float scale = lane < 16 ? (lane < 8 ? scales[0] : scales[1]) : (lane < 24 ? scales[2] : scales[3]);
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = scale * (float)(signed char)(codes >> (8 * j) & 0xFFu);
    } else {
        codes >>= 16 * (lane % 2);
#pragma unroll
        for (int j = 0; j < 4; j++) w[j] = scales[j] * of_nibble(format, codes >> (4 * j));
    }
}

// The same from bytes at any address.
__device__ __forceinline__ float one_weight(const u8 *row, int format, i64 l) {
    const u8 *block = row + l / BLOCK * block_bytes(format);
    int e = (int)(l % BLOCK), group = e / 32;
    float scale = bf16_to_float(block[2 * group] | (u32)block[2 * group + 1] << 8);
    if (format == INT8) return scale * (float)(signed char)block[SCALE_BYTES + e];
    int bit = 4 * group + 16 * (e / 16 % 2);
    return scale * of_nibble(format, block[SCALE_BYTES + 4 * (e % 16) + bit / 8] >> (bit % 8));
}

// Weights d .. d + 8 of the group that begins at `l`, d a multiple of 8.
__device__ __forceinline__ void eight_weights(const u8 *row, int format, i64 l, int d, bool aligned, float w[8]) {
    if (!aligned) {
#pragma unroll
        for (int j = 0; j < 8; j++) w[j] = one_weight(row, format, l + d + j);
        return;
    }
    const u8 *block = row + l / BLOCK * block_bytes(format);
    int group = (int)(l % BLOCK) / 32;
    float scale = bf16_to_float(((const u16 *)block)[group]);
    if (format == INT8) {
        const u32 *words = (const u32 *)(block + SCALE_BYTES + 32 * group + d);
#pragma unroll
        for (int j = 0; j < 8; j++) w[j] = scale * (float)(signed char)(words[j / 4] >> (8 * (j % 4)) & 0xFFu);
    } else {
        // Eight words, one half of each: weight d + j is in word (d + j) % 16.
        const u32 *words = (const u32 *)(block + SCALE_BYTES) + d % 16;
        int shift = 4 * group + d / 16 * 16;
#pragma unroll
        for (int j = 0; j < 8; j++) w[j] = scale * of_nibble(format, words[j] >> shift);
    }
}

// ROWS is a number that the loops over rows unroll to; rows beyond m are zeros.
template <int ROWS>
__device__ __forceinline__ void thin(const void *a, int a_dtype, const u8 *w, int format, void *out, int out_dtype,
                                     const Epilogue &epilogue, int m, i64 n, i64 l) {
    float *columns = (float *)dynamic_shared;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    i64 blocks = (l + BLOCK - 1) / BLOCK;
    i64 column = (i64)blockIdx.x * 8 + warp;
    const u8 *row = w + min(column, n - 1) * blocks * block_bytes(format);
    bool words = ((u64)w & 3) == 0;
    float sums[ROWS] = {};
    for (i64 first = 0; first < l; first += THIN_COLUMNS) {
        int count = (int)min(l - first, (i64)THIN_COLUMNS);
        __syncthreads();
        for (int i = threadIdx.x; i < ROWS * THIN_COLUMNS; i += 256) {
            int r = i / THIN_COLUMNS, c = i % THIN_COLUMNS;
            columns[i] = r < m && c < count ? load(a, a_dtype, r * l + first + c) : 0.0f;
        }
        __syncthreads();
#pragma unroll 4
        for (int at = 0; at < count; at += BLOCK) {
            float weights[4];
            if (words) {
                lane_weights(row + (first + at) / BLOCK * block_bytes(format), format, lane, weights);
            } else {
#pragma unroll
                for (int j = 0; j < 4; j++) weights[j] = one_weight(row, format, first + at + lane_weight(format, lane, j));
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const float *x = columns + r * THIN_COLUMNS + at;
                float4 four;
                if (format == INT8) {
                    four = *(const float4 *)(x + 4 * lane);
                } else {
                    x += lane / 2 + 16 * (lane % 2);
                    four = make_float4(x[0], x[32], x[64], x[96]);
                }
                sums[r] += four.x * weights[0];
                sums[r] += four.y * weights[1];
                sums[r] += four.z * weights[2];
                sums[r] += four.w * weights[3];
            }
        }
    }
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        float sum = warp_sum(sums[r]);
        i64 at = r * n + column;
        if (lane == 0 && r < m && column < n) store(out, out_dtype, at, finished(epilogue, at, column, sum));
    }
}

// 256 threads; grid: 8 columns a block; shared: THIN_COLUMNS floats for 1, 2, 4 or 8 rows, whichever m needs.
extern "C" __global__ void __launch_bounds__(256, 1)
quantized_thin(const void *a, int a_dtype, const u8 *w, int format, void *out, int out_dtype, const void *bias,
               int bias_dtype, const void *residual, int residual_dtype, int m, i64 n, i64 l) {
    Epilogue epilogue = {bias, bias_dtype, residual, residual_dtype};
    if (m <= 1) {
        thin<1>(a, a_dtype, w, format, out, out_dtype, epilogue, m, n, l);
    } else if (m <= 2) {
        thin<2>(a, a_dtype, w, format, out, out_dtype, epilogue, m, n, l);
    } else if (m <= 4) {
        thin<4>(a, a_dtype, w, format, out, out_dtype, epilogue, m, n, l);
    } else {
        thin<8>(a, a_dtype, w, format, out, out_dtype, epilogue, m, n, l);
    }
}

#define SLAB 32

// One block a tile of 64 × 64, 256 threads; a slab is one group of weights deep, so that it has one scale a row.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
quantized_tile(const void *a, int a_dtype, const u8 *w, int format, void *out, int out_dtype, const void *bias,
               int bias_dtype, const void *residual, int residual_dtype, i64 m, i64 n, i64 l) {
    Epilogue epilogue = {bias, bias_dtype, residual, residual_dtype};
    float *a_slab = (float *)dynamic_shared, *w_slab = a_slab + SLAB * TILE_STRIDE;
    i64 across = (n + TILE - 1) / TILE, row_bytes = (l + BLOCK - 1) / BLOCK * block_bytes(format);
    i64 row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
    bool vector = aligned16(a) && l % 8 == 0;
    // A thread loads eight inner indices of one row of each operand.
    int r = threadIdx.x / 4, d = threadIdx.x % 4 * 8;
    const u8 *w_row = w + min(column + r, n - 1) * row_bytes;
    bool words = ((u64)w & 3) == 0;
    float sums[4][4] = {};
    for (i64 inner = 0; inner < l; inner += SLAB) {
        float x[8], weights[8];
        i64 left = row + r < m ? l - inner - d : 0;
        load8_or_less(a, a_dtype, (row + r) * l + inner + d, (int)max(min(left, (i64)8), (i64)0), vector, x);
        // Rows are filled up to a whole block, so this never reads beyond one.
        eight_weights(w_row, format, inner, d, words, weights);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            a_slab[(d + j) * TILE_STRIDE + r] = x[j];
            w_slab[(d + j) * TILE_STRIDE + r] = weights[j];
        }
        __syncthreads();
        tile_product(sums, a_slab, w_slab, SLAB);
        __syncthreads();
    }
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            i64 at_row = row + 4 * y + i, c = column + 4 * x + j, at = at_row * n + c;
            if (at_row < m && c < n) store(out, out_dtype, at, finished(epilogue, at, c, sums[i][j]));
        }
}
