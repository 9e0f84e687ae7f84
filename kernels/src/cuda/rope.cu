// Rotary position embedding (Su et al., arXiv 2104.09864) of elements first to first + 2·half − 1 of each head.
//
//   rope_rotate   for x[t, h] from `first` on: (x_i, x_{i+half}), or of neighbours (x_{2i}, x_{2i+1}): (a, b) ← (a·cos − b·sin, b·cos + a·sin)
//                 angle = positions[t]·inv_freq[i], one f32 product; cos and sin are multiplied by `scale`;
//                 backward turns the other way
//
// A block takes a token, or several one after the other: threads (y, x) of (blockDim/32, 32), x over i, y over heads, so
// that one sine and cosine serves all heads of a thread. Bytes: x read and written once. FLOPs: 6 a pair. sincosf has an
// exact range reduction, which positions of a hundred thousand need.

extern "C" __global__ void __launch_bounds__(256)
rope_rotate(void *x, int x_dtype, const int *positions, const float *inv_freq, float scale, int backward, i64 tokens,
            int heads, int head_size, int half, int first, int neighbours) {
    int apart = neighbours ? 1 : half;
    int lane = threadIdx.x % 32, first_head = threadIdx.x / 32, head_step = blockDim.x / 32;
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        float position = (float)positions[t];
        for (int i = lane; i < half; i += 32) {
            float sine, cosine;
            sincosf(__fmul_rn(position, inv_freq[i]), &sine, &cosine);
            sine *= backward ? -scale : scale;
            cosine *= scale;
            for (int h = first_head; h < heads; h += head_step) {
                i64 at = (t * heads + h) * head_size + first + (neighbours ? 2 * i : i);
                float low = load(x, x_dtype, at), high = load(x, x_dtype, at + apart);
                store(x, x_dtype, at, low * cosine - high * sine);
                store(x, x_dtype, at + apart, high * cosine + low * sine);
            }
        }
    }
}
