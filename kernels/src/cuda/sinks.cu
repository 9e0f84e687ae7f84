// Attention sinks (Xiao et al., arXiv 2309.17453; gpt-oss, arXiv 2508.10925): one more score for every row, of a key without a value.
//
//   sinks_add        lse = ln(exp(lse) + exp(sinks[h])),  out *= σ(old lse − sinks[h])
//   sinks_backward   dsinks[h] −= Σ_bs exp(sinks[h] − lse[b, h, s])·Σ_k dout·out
//
// Shapes: sinks and dsinks [heads]; out and dout [batch, queries, heads, size]; lse [batch, heads, queries]. lse and dsinks are f32.
//
// A block of `sinks_add` takes a tile of POSITIONS × HEADS rows: each thread has the lse of one, positions side by side as they lie,
// and then eight threads take a row of out, heads side by side as they lie. Bytes: out and lse read and written. One FLOP an element, and
// an exponential and a logarithm a row. With e = exp(−|lse − sink|), at most 1, nothing overflows.
//
// A block of `sinks_backward` takes all rows of a head, which is as many blocks as heads; more would need memory for partial sums.
// Bytes: out and dout once. Two FLOPs an element. Order of sums: thread (y, x) adds columns 8·(x + 8·i) … of rows y, y + 128, …, then
// lanes, then warps; last the old value.

// kernels/src/cuda/sinks.rs has the same.
#define POSITIONS 32
#define HEADS 8

#define MINUS_INFINITY __uint_as_float(0xFF800000u)

extern "C" __global__ void __launch_bounds__(256)
sinks_add(const void *sinks, int sinks_dtype, void *out, int out_dtype, float *lse, i64 batch, i64 queries, i64 heads, int size) {
    // What is left of the weights of each row; negative where there were none.
    __shared__ float left[HEADS][POSITIONS];
    bool vector = size % 8 == 0 && aligned16(out);
    int x = threadIdx.x % 8, y = threadIdx.x / 8;
    i64 across = (heads + HEADS - 1) / HEADS, along = (queries + POSITIONS - 1) / POSITIONS;
    for (i64 tile = blockIdx.x; tile < batch * along * across; tile += gridDim.x) {
        i64 first_head = tile % across * HEADS, first = tile / across % along * POSITIONS, b = tile / across / along;
        i64 of_head = first_head + threadIdx.x / POSITIONS, of_position = first + threadIdx.x % POSITIONS;
        if (of_head < heads && of_position < queries) {
            i64 at = (b * heads + of_head) * queries + of_position;
            float sink = load(sinks, sinks_dtype, of_head), old = lse[at];
            // Equal infinities have no difference.
            float difference = old == sink ? 0.0f : old - sink, e = expf(-fabsf(difference));
            float share = (difference < 0.0f ? e : 1.0f) / (1.0f + e);
            left[threadIdx.x / POSITIONS][threadIdx.x % POSITIONS] = old == MINUS_INFINITY ? -1.0f : share;
            lse[at] = (old > sink ? old : sink) + log1pf(e);
        }
        __syncthreads();
        for (int row = y; row < HEADS * POSITIONS; row += 32) {
            int h = row % HEADS, s = row / HEADS;
            if (first_head + h >= heads || first + s >= queries) continue;
            i64 at = ((b * queries + first + s) * heads + first_head + h) * size;
            float share = left[h][s], v[8];
            for (int c = 8 * x; c < size; c += 64) {
                int count = min(size - c, 8);
                load8_or_less(out, out_dtype, at + c, count, vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++) v[j] = share < 0.0f ? 0.0f : v[j] * share;
                store8_or_less(out, out_dtype, at + c, count, vector, v);
            }
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(1024)
sinks_backward(const void *sinks, int sinks_dtype, const void *out, int out_dtype, const float *lse, const void *dout, int dout_dtype,
               float *dsinks, i64 batch, i64 queries, i64 heads, int size) {
    __shared__ float warps[33];
    bool vector = size % 8 == 0 && aligned16(out) && aligned16(dout);
    int x = threadIdx.x % 8, y = threadIdx.x / 8;
    for (i64 h = blockIdx.x; h < heads; h += gridDim.x) {
        float sink = load(sinks, sinks_dtype, h), sum = 0.0f;
        for (i64 row = y; row < batch * queries; row += 128) {
            i64 b = row / queries, s = row % queries, at = (row * heads + h) * size;
            float delta = 0.0f;
            for (int c = 8 * x; c < size; c += 64) {
                int count = min(size - c, 8);
                float of_out[8], of_dout[8];
                load8_or_less(out, out_dtype, at + c, count, vector, of_out);
                load8_or_less(dout, dout_dtype, at + c, count, vector, of_dout);
#pragma unroll
                for (int j = 0; j < 8; j++) delta += of_out[j] * of_dout[j];
            }
            // A sink of −∞ is no key at all, also where there is no other.
            sum += (sink == MINUS_INFINITY ? 0.0f : expf(sink - lse[(b * heads + h) * queries + s])) * delta;
        }
        sum = block_sum(sum, warps);
        if (threadIdx.x == 0) dsinks[h] -= sum;
    }
}
