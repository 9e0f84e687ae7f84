// Root-mean-square normalization (Zhang and Sennrich, arXiv 1910.07467) of rows x[r] of `width` elements:
//
//   rms_norm_forward   rstd[r] = 1/√(Σx²/width + eps),  out = x·rstd·weight
//   rms_norm_dx        g = dout·weight, x̂ = x·rstd:  dx (+)= rstd·(g − x̂·Σ(g·x̂)/width)
//   rms_norm_dweight   dweight[c] += Σ_r dout·x̂
//   center_rows        out (+)= x − Σx/width
//
// A block takes a row, or several one after the other. Of what it has, a thread keeps the first eight columns in registers between
// the sum and what is made with it, which is all of a row up to 8192 columns; the rest it reads again. Bytes: forward x and out once (what
// is read again is served by the caches), backward dout and x twice, dx once or, accumulating, twice. FLOPs: 4, 8 and 3 an element.
//
// Order of sums: thread t of a row adds elements 8·(t + threads·i) …, then lanes, then warps; column sums are those of
// `sum_columns`. rstd is 1/√ of the f32 mean, divided and rooted correctly rounded. Where squares leave the range of f32,
// which x does not, the row is summed again in f64; backward has no squares.

// 2^-100: below it, squares that f32 rounds to multiples of 2^-149 may count; and the largest f32.
#define MEAN_MIN 7.8886091e-31f
#define MEAN_MAX 3.4028235e38f

// Eight columns of a row at a time, or what is left of it, from column `first` of the thread on.
#define FOR_EIGHTS(first, c, width) for (i64 c = (first); c < (width); c += 8 * blockDim.x)

// Elements of eight columns from `c` on, zero beyond the row.
__device__ __forceinline__ void eight_of(const void *from, int dtype, i64 row, i64 c, i64 width, bool vector, float x[8]) {
    load8_or_less(from, dtype, row + c, (int)max(min(width - c, (i64)8), (i64)0), vector, x);
}

__device__ __forceinline__ float sum_of_squares(const float v[8], float sum) {
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j] * v[j];
    return sum;
}

__device__ __forceinline__ void store_scaled(void *out, int out_dtype, i64 row, i64 c, i64 width, bool vector, float scale,
                                             const float x[8], const float weight[8]) {
    float v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = x[j] * scale * weight[j];
    store8_or_less(out, out_dtype, row + c, (int)min(width - c, (i64)8), vector, v);
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_forward(const void *x, int x_dtype, const void *weight, int weight_dtype, float eps, void *out, int out_dtype,
                 float *rstd, i64 rows, i64 width) {
    __shared__ float warps[33];
    __shared__ double wide_warps[33];
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(weight) && aligned16(out);
    i64 first = 8 * threadIdx.x, second = first + 8 * blockDim.x;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        float v[8], w[8];
        eight_of(x, x_dtype, at, first, width, vector, v);
        eight_of(weight, weight_dtype, 0, first, width, vector, w);
        float squares = sum_of_squares(v, 0.0f);
        FOR_EIGHTS(second, c, width) {
            float more[8];
            eight_of(x, x_dtype, at, c, width, vector, more);
            squares = sum_of_squares(more, squares);
        }
        float mean = block_sum(squares, warps) / (float)width;
        float scale = 1.0f / sqrtf(mean + eps);
        if (!(mean + eps >= MEAN_MIN && mean <= MEAN_MAX)) {
            double wide_squares = 0.0;
            FOR_EIGHTS(first, c, width) {
                float again[8];
                eight_of(x, x_dtype, at, c, width, vector, again);
#pragma unroll
                for (int j = 0; j < 8; j++) wide_squares += (double)again[j] * (double)again[j];
            }
            scale = (float)(1.0 / sqrt(block_sum(wide_squares, wide_warps) / (double)width + (double)eps));
        }
        if (threadIdx.x == 0) rstd[row] = scale;
        if (first < width) store_scaled(out, out_dtype, at, first, width, vector, scale, v, w);
        FOR_EIGHTS(second, c, width) {
            float more[8], weights[8];
            eight_of(x, x_dtype, at, c, width, vector, more);
            eight_of(weight, weight_dtype, 0, c, width, vector, weights);
            store_scaled(out, out_dtype, at, c, width, vector, scale, more, weights);
        }
    }
}

// What eight columns of dx are made of.
struct Eight {
    // dout·weight, and x·rstd.
    float g[8], normal[8];
};

__device__ __forceinline__ void load_eight(Eight &eight, const void *dout, int dout_dtype, const void *x, int x_dtype,
                                           const void *weight, int weight_dtype, float scale, i64 row, i64 c, i64 width,
                                           bool vector) {
    float w[8];
    eight_of(dout, dout_dtype, row, c, width, vector, eight.g);
    eight_of(x, x_dtype, row, c, width, vector, eight.normal);
    eight_of(weight, weight_dtype, 0, c, width, vector, w);
#pragma unroll
    for (int j = 0; j < 8; j++) eight.g[j] *= w[j], eight.normal[j] *= scale;
}

__device__ __forceinline__ float sum_of_products(const Eight &eight, float sum) {
#pragma unroll
    for (int j = 0; j < 8; j++) sum += eight.g[j] * eight.normal[j];
    return sum;
}

__device__ __forceinline__ void store_dx(void *dx, int dx_dtype, int accumulate, const Eight &eight, float scale, float mean, i64 row,
                                         i64 c, i64 width, bool vector) {
    float v[8], old[8];
    if (accumulate) eight_of(dx, dx_dtype, row, c, width, vector, old);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = scale * (eight.g[j] - eight.normal[j] * mean);
        if (accumulate) v[j] += old[j];
    }
    store8_or_less(dx, dx_dtype, row + c, (int)min(width - c, (i64)8), vector, v);
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_dx(const void *dout, int dout_dtype, const void *x, int x_dtype, const void *weight, int weight_dtype,
            const float *rstd, void *dx, int dx_dtype, int accumulate, i64 rows, i64 width) {
    __shared__ float warps[33];
    bool vector = width % 8 == 0 && aligned16(dout) && aligned16(x) && aligned16(weight) && aligned16(dx);
    i64 first = 8 * threadIdx.x, second = first + 8 * blockDim.x;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        float scale = rstd[row];
        Eight kept, more;
        load_eight(kept, dout, dout_dtype, x, x_dtype, weight, weight_dtype, scale, at, first, width, vector);
        float sum = sum_of_products(kept, 0.0f);
        FOR_EIGHTS(second, c, width) {
            load_eight(more, dout, dout_dtype, x, x_dtype, weight, weight_dtype, scale, at, c, width, vector);
            sum = sum_of_products(more, sum);
        }
        float mean = block_sum(sum, warps) / (float)width;
        if (first < width) store_dx(dx, dx_dtype, accumulate, kept, scale, mean, at, first, width, vector);
        FOR_EIGHTS(second, c, width) {
            load_eight(more, dout, dout_dtype, x, x_dtype, weight, weight_dtype, scale, at, c, width, vector);
            store_dx(dx, dx_dtype, accumulate, more, scale, mean, at, c, width, vector);
        }
    }
}

__device__ __forceinline__ float sum_of(const float v[8], float sum) {
#pragma unroll
    for (int j = 0; j < 8; j++) sum += v[j];
    return sum;
}

__device__ __forceinline__ void store_centered(void *out, int out_dtype, int accumulate, const float x[8], float mean, i64 row, i64 c,
                                               i64 width, bool vector) {
    float v[8], old[8];
    if (accumulate) eight_of(out, out_dtype, row, c, width, vector, old);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        v[j] = x[j] - mean;
        if (accumulate) v[j] += old[j];
    }
    store8_or_less(out, out_dtype, row + c, (int)min(width - c, (i64)8), vector, v);
}

extern "C" __global__ void __launch_bounds__(1024)
center_rows(const void *x, int x_dtype, void *out, int out_dtype, int accumulate, i64 rows, i64 width) {
    __shared__ float warps[33];
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(out);
    i64 first = 8 * threadIdx.x, second = first + 8 * blockDim.x;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        float v[8], more[8];
        eight_of(x, x_dtype, at, first, width, vector, v);
        float sum = sum_of(v, 0.0f);
        FOR_EIGHTS(second, c, width) {
            eight_of(x, x_dtype, at, c, width, vector, more);
            sum = sum_of(more, sum);
        }
        float mean = block_sum(sum, warps) / (float)width;
        if (first < width) store_centered(out, out_dtype, accumulate, v, mean, at, first, width, vector);
        FOR_EIGHTS(second, c, width) {
            eight_of(x, x_dtype, at, c, width, vector, more);
            store_centered(out, out_dtype, accumulate, more, mean, at, c, width, vector);
        }
    }
}

// 32 × 32 threads a block; see `sum_columns`.
extern "C" __global__ void __launch_bounds__(1024)
rms_norm_dweight(const void *dout, int dout_dtype, const void *x, int x_dtype, const float *rstd, float *dweight,
                 i64 rows, i64 width) {
    sum_columns(rows, width, dweight, [=](i64 row, i64 at) {
        return load(dout, dout_dtype, at) * (load(x, x_dtype, at) * rstd[row]);
    });
}
