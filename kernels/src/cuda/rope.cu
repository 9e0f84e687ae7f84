// Rotary position embedding (Su et al., arXiv 2104.09864), half-split as in Hugging Face, of the first 2·half elements of each head.
//
//   rope_rotate   for x[t, h]: (x_i, x_{i+half}) ← (x_i·cos − x_{i+half}·sin, x_{i+half}·cos + x_i·sin)
//                 angle = positions[t]·inv_freq[i], one f32 product; cos and sin are multiplied by `scale`;
//                 backward turns the other way
//
// A block takes a token, or several one after the other: threads (y, x) of (blockDim/32, 32), x over i, y over heads, so
// that one sine and cosine serves all heads of a thread. Bytes: x read and written once. FLOPs: 6 a pair. sincosf has an
// exact range reduction, which positions of a hundred thousand need.

extern "C" __global__ void __launch_bounds__(256)
rope_rotate(void *x, int x_dtype, const int *positions, const float *inv_freq, float scale, int backward, i64 tokens,
            int heads, int head_size, int half) {
    int lane = threadIdx.x % 32, first_head = threadIdx.x / 32, head_step = blockDim.x / 32;
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        float position = (float)positions[t];
        for (int i = lane; i < half; i += 32) {
            float sine, cosine;
            sincosf(__fmul_rn(position, inv_freq[i]), &sine, &cosine);
            sine *= backward ? -scale : scale;
            cosine *= scale;
            for (int h = first_head; h < heads; h += head_step) {
                i64 at = (t * heads + h) * head_size + i;
                float low = load(x, x_dtype, at), high = load(x, x_dtype, at + half);
                store(x, x_dtype, at, low * cosine - high * sine);
                store(x, x_dtype, at + half, high * cosine + low * sine);
            }
        }
    }
}
