// Root-mean-square normalization (Zhang and Sennrich, arXiv 1910.07467) of rows x[r] of `width` elements:
//
//   rms_norm_forward   rstd[r] = 1/√(Σx²/width + eps),  out = x·rstd·weight
//   rms_norm_dx        g = dout·weight, x̂ = x·rstd:  dx (+)= rstd·(g − x̂·Σ(g·x̂)/width)
//   rms_norm_dweight   dweight[c] += Σ_r dout·x̂
//
// A block takes a row, or several one after the other. Bytes: forward x and out once (the second reading of a row is
// served by the caches), backward dout and x twice, dx once or, accumulating, twice. FLOPs: 4, 8 and 3 an element.
//
// Order of sums: thread t of a row adds elements 8·(t + threads·i) …, then lanes, then warps; column sums are those of
// `sum_columns`. rstd is 1/√ of the f32 mean, divided and rooted correctly rounded. Where squares leave the range of f32,
// which x does not, the row is summed again in f64; backward has no squares.

// 2^-100: below it, squares that f32 rounds to multiples of 2^-149 may count; and the largest f32.
#define MEAN_MIN 7.8886091e-31f
#define MEAN_MAX 3.4028235e38f

// Eight columns of a row at a time, or what is left of it.
#define FOR_EIGHTS(c, width) for (i64 c = 8 * threadIdx.x; c < (width); c += 8 * blockDim.x)

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_forward(const void *x, int x_dtype, const void *weight, int weight_dtype, float eps, void *out, int out_dtype,
                 float *rstd, i64 rows, i64 width) {
    __shared__ float warps[33];
    __shared__ double wide_warps[33];
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(weight) && aligned16(out);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        float squares = 0.0f;
        FOR_EIGHTS(c, width) {
            float v[8];
            load8_or_less(x, x_dtype, at + c, (int)min(width - c, (i64)8), vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) squares += v[j] * v[j];
        }
        float mean = block_sum(squares, warps) / (float)width;
        float scale = 1.0f / sqrtf(mean + eps);
        if (!(mean + eps >= MEAN_MIN && mean <= MEAN_MAX)) {
            double wide_squares = 0.0;
            FOR_EIGHTS(c, width) {
                float v[8];
                load8_or_less(x, x_dtype, at + c, (int)min(width - c, (i64)8), vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++) wide_squares += (double)v[j] * (double)v[j];
            }
            scale = (float)(1.0 / sqrt(block_sum(wide_squares, wide_warps) / (double)width + (double)eps));
        }
        if (threadIdx.x == 0) rstd[row] = scale;
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float v[8], w[8];
            load8_or_less(x, x_dtype, at + c, count, vector, v);
            load8_or_less(weight, weight_dtype, c, count, vector, w);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = v[j] * scale * w[j];
            store8_or_less(out, out_dtype, at + c, count, vector, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(1024)
rms_norm_dx(const void *dout, int dout_dtype, const void *x, int x_dtype, const void *weight, int weight_dtype,
            const float *rstd, void *dx, int dx_dtype, int accumulate, i64 rows, i64 width) {
    __shared__ float warps[33];
    bool vector = width % 8 == 0 && aligned16(dout) && aligned16(x) && aligned16(weight) && aligned16(dx);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        float scale = rstd[row], sum = 0.0f;
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float d[8], v[8], w[8];
            load8_or_less(dout, dout_dtype, at + c, count, vector, d);
            load8_or_less(x, x_dtype, at + c, count, vector, v);
            load8_or_less(weight, weight_dtype, c, count, vector, w);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += d[j] * w[j] * (v[j] * scale);
        }
        float mean = block_sum(sum, warps) / (float)width;
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float d[8], v[8], w[8], old[8];
            load8_or_less(dout, dout_dtype, at + c, count, vector, d);
            load8_or_less(x, x_dtype, at + c, count, vector, v);
            load8_or_less(weight, weight_dtype, c, count, vector, w);
            if (accumulate) load8_or_less(dx, dx_dtype, at + c, count, vector, old);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                v[j] = scale * (d[j] * w[j] - v[j] * scale * mean);
                if (accumulate) v[j] += old[j];
            }
            store8_or_less(dx, dx_dtype, at + c, count, vector, v);
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
