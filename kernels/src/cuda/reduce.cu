// Sums.
//
//   reduce_sum_rows   out[c] += Σ_r x[r, c], f32; x is [rows, width]
//
// Bytes: x once. One FLOP an element. Order of sums: `sum_columns` of common.cuh.

extern "C" __global__ void __launch_bounds__(1024)
reduce_sum_rows(const void *x, int x_dtype, float *out, i64 rows, i64 width) {
    sum_columns(rows, width, out, [=](i64, i64 at) { return load(x, x_dtype, at); });
}
