// The sum of the squares of a gradient in f64, for its norm.
//
//   sum_of_squares_blocks   sums[b] = Σ x[i]² over block b of x[n]: block_len values, a multiple of 8, or what is left
//   sum_of_squares_add      total[0] += Σ_b sums[b], b ascending
//
// The order is that of terrace-optimizer's `SumOfSquares`, and so are the bits: value i of a block goes to lane i mod 8, each lane
// adds its squares from first to last, and the lanes are added as a tree. Squares of f32 are exact in f64, which is why a
// fused multiply-add rounds as the two operations do.
//
// Bytes: x once. Two FLOPs in f64 an element. Eight threads have a block, one a lane; a gradient keeps a card busy from some
// ten millions of values on.

#define LANES 8

__device__ __forceinline__ double widened(const void *from, int dtype, i64 i) {
    return (double)load(from, dtype, i);
}

extern "C" __global__ void __launch_bounds__(256)
sum_of_squares_blocks(const void *x, int dtype, double *sums, i64 n, i64 block_len) {
    int lane = threadIdx.x % LANES;
    i64 blocks = (n + block_len - 1) / block_len, stride = (i64)gridDim.x * blockDim.x / LANES;
    i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / LANES;
    // The threads of a warp stay together while one of them has a block.
    for (i64 block = start; block / 4 * 4 < blocks; block += stride) {
        i64 i = block * block_len + lane, end = min(n, (block + 1) * block_len);
        double sum = 0.0;
        // Several loads under way, and added in order.
        for (; i + 7 * LANES < end; i += 8 * LANES) {
            double values[8];
#pragma unroll
            for (int j = 0; j < 8; j++) values[j] = widened(x, dtype, i + j * LANES);
#pragma unroll
            for (int j = 0; j < 8; j++) sum = __fma_rn(values[j], values[j], sum);
        }
        for (; i < end; i += LANES) {
            double value = widened(x, dtype, i);
            sum = __fma_rn(value, value, sum);
        }
        // ((a + e) + (c + g)) + ((b + f) + (d + h))
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum = __dadd_rn(sum, __shfl_xor_sync(ALL_LANES, sum, lanes));
        if (lane == 0 && block < blocks) sums[block] = sum;
    }
}

// One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) sum_of_squares_add(const double *sums, i64 blocks, double *total) {
    add_in_order(sums, blocks, total);
}
