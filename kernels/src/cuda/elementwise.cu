// Element by element.
//
//   elementwise_add       out[i] = a[i] + b[i]; out may be a             n elements      1 FLOP an element
//   elementwise_add_bias  x[r, c] += bias[c]                            rows × width    1 FLOP an element
//   elementwise_affine    x[i] = factor * x[i] + offset                 n elements      2 FLOP an element
//   elementwise_multiply  out[i] = a[i] * b[i]                          n elements      1 FLOP an element
//   elementwise_scale     x[i] *= factor[0]                             n elements      1 FLOP an element
//   elementwise_cap       x[i] = cap * tanh(x[i] / cap)                 n elements      a tanh and 2 FLOP an element
//   elementwise_cast      out[i] = x[i] rounded to nearest even; equal dtypes copy bits
//   elementwise_zero      bytes of zeros
//
// Bytes: every operand once (bias: once a row, from the cache). Sums are taken in f32.

extern "C" __global__ void __launch_bounds__(256)
elementwise_add(const void *a, int a_dtype, const void *b, int b_dtype, void *out, int out_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 vectors = aligned16(a) && aligned16(b) && aligned16(out) ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float x[8], y[8];
        load8(a, a_dtype, 8 * v, x);
        load8(b, b_dtype, 8 * v, y);
#pragma unroll
        for (int j = 0; j < 8; j++) x[j] += y[j];
        store8(out, out_dtype, 8 * v, x);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads)
        store(out, out_dtype, i, load(a, a_dtype, i) + load(b, b_dtype, i));
}

// One block a row, or more than one row after the other; x may have any width.
extern "C" __global__ void __launch_bounds__(256)
elementwise_add_bias(void *x, int x_dtype, const void *bias, int bias_dtype, i64 rows, i64 width) {
    bool vector = aligned16(x) && aligned16(bias) && width % 8 == 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * width;
        if (vector) {
            for (i64 c = 8 * threadIdx.x; c < width; c += 8 * blockDim.x) {
                float a[8], b[8];
                load8(x, x_dtype, at + c, a);
                load8(bias, bias_dtype, c, b);
#pragma unroll
                for (int j = 0; j < 8; j++) a[j] += b[j];
                store8(x, x_dtype, at + c, a);
            }
        } else {
            for (i64 c = threadIdx.x; c < width; c += blockDim.x)
                store(x, x_dtype, at + c, load(x, x_dtype, at + c) + load(bias, bias_dtype, c));
        }
    }
}

// Replaces every element by what `f` makes of it.
template <typename F> __device__ __forceinline__ void in_place(void *x, int x_dtype, i64 n, F f) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 vectors = aligned16(x) ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float values[8];
        load8(x, x_dtype, 8 * v, values);
#pragma unroll
        for (int j = 0; j < 8; j++) values[j] = f(values[j]);
        store8(x, x_dtype, 8 * v, values);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) store(x, x_dtype, i, f(load(x, x_dtype, i)));
}

extern "C" __global__ void __launch_bounds__(256)
elementwise_affine(void *x, int x_dtype, float factor, float offset, i64 n) {
    in_place(x, x_dtype, n, [=](float x) { return x * factor + offset; });
}

// Of weights of choices, which are few: an element at a time.
extern "C" __global__ void __launch_bounds__(256)
elementwise_multiply(const void *a, int a_dtype, const void *b, int b_dtype, void *out, int out_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = thread; i < n; i += threads) store(out, out_dtype, i, load(a, a_dtype, i) * load(b, b_dtype, i));
}

extern "C" __global__ void __launch_bounds__(256)
elementwise_scale(void *x, int x_dtype, const void *factor, int factor_dtype, i64 n) {
    float by = load(factor, factor_dtype, 0);
    in_place(x, x_dtype, n, [=](float x) { return x * by; });
}

extern "C" __global__ void __launch_bounds__(256) elementwise_cap(void *x, int x_dtype, float cap, i64 n) {
    in_place(x, x_dtype, n, [=](float x) { return cap * tanhf(x / cap); });
}

// Equal dtypes keep every bit, NaNs included.
__device__ __forceinline__ void copy_bytes(const void *from, void *to, i64 bytes, i64 thread, i64 threads) {
    i64 vectors = aligned16(from) && aligned16(to) ? bytes / 16 : 0;
    for (i64 v = thread; v < vectors; v += threads) ((uint4 *)to)[v] = ((const uint4 *)from)[v];
    for (i64 i = 16 * vectors + thread; i < bytes; i += threads) ((u8 *)to)[i] = ((const u8 *)from)[i];
}

extern "C" __global__ void __launch_bounds__(256)
elementwise_cast(const void *x, int x_dtype, void *out, int out_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    if (x_dtype == out_dtype) {
        copy_bytes(x, out, n * (x_dtype == F32 ? 4 : 2), thread, threads);
        return;
    }
    i64 vectors = aligned16(x) && aligned16(out) ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float values[8];
        load8(x, x_dtype, 8 * v, values);
        store8(out, out_dtype, 8 * v, values);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) store(out, out_dtype, i, load(x, x_dtype, i));
}

extern "C" __global__ void __launch_bounds__(256) elementwise_zero(void *out, i64 bytes) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 vectors = aligned16(out) ? bytes / 16 : 0;
    for (i64 v = thread; v < vectors; v += threads) ((uint4 *)out)[v] = make_uint4(0, 0, 0, 0);
    for (i64 i = 16 * vectors + thread; i < bytes; i += threads) ((u8 *)out)[i] = 0;
}
