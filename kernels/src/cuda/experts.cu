// Mixture of experts (Shazeer et al., arXiv 1701.06538): which experts tokens choose, and rows to their experts and back.
//
//   experts_choose           chosen[t] = the experts of the largest of logits[t], or of scores[t] + bias; weights[t] = their scores,
//                            divided by the sum over them if `normalize`, times `scale`; scores are a softmax, or sigmoids. If there are
//                            `groups`, experts are of the `kept` ones whose largest, or whose two largest scores' sum, is largest
//   experts_count            starts[e + 1] = choices of expert e
//   experts_starts           starts[e] = Σ choices of experts before e
//   experts_rows             rows[i] = starts[chosen[i]] + choices of the same expert before i
//   experts_route_backward   dlogits = p·(g − Σ p·g), or p·(1 − p)·g of sigmoids, g as `Experts::route_backward` has it
//   experts_spread           out[rows[t, j]] = x[t]
//   experts_collect          out[t] = Σ_j x[rows[t, j]] + residual[t], j ascending
//   experts_weigh            out[rows[i]] = weights[i]·x[rows[i]]
//   experts_weigh_backward   dweights[i] = Σ d[rows[i]]·x[rows[i]], then d[rows[i]] *= weights[i]
//
// Shapes: logits [tokens, experts]; weights, chosen and rows [tokens, choices]; routed rows [tokens·choices, width].
//
// A warp takes the logits of a token. It finds the largest again for every choice, as the first of those that come after the one
// before, which needs no memory of what was chosen: experts·choices/32 comparisons a lane, of logits in the first-level cache, and with a
// bias as many scores. Before that a lane finds the score of a group, one expert after the other, and which groups come before it.
//
// Routed rows are numbered by a counting sort without atomics: a block for every expert walks all choices, in order, twice.
// That reads choices·experts integers, from the second-level cache (128 experts and 32 Ki choices: 16 MiB).
//
// A block takes a row of what is moved. Bytes: each operand once, d read and written. FLOPs: none to spread, one a term to collect,
// 1 and 3 an element to weigh and back.

#define WARPS 8

// Whether `a` of expert `e` comes before `b` of expert `f`: larger ones first, then lower experts, NaNs last.
__device__ __forceinline__ bool comes_before(float a, int e, float b, int f) {
    bool a_is_nan = a != a, b_is_nan = b != b;
    if (a_is_nan != b_is_nan) return b_is_nan;
    if (!a_is_nan && a != b) return a > b;
    return e < f;
}

// What makes scores of a row's logits, for every lane: of a softmax its maximum and 1/Σ exp(x − maximum).
struct RowScores {
    int sigmoid;
    float most, inverse;

    __device__ __forceinline__ float of(float x) const {
        return sigmoid ? 1.0f / (1.0f + expf(-x)) : expf(x - most) * inverse;
    }
};

__device__ __forceinline__ RowScores warp_scores(const void *logits, int dtype, int sigmoid, i64 at, int experts) {
    if (sigmoid) return {1, 0.0f, 0.0f};
    int lane = threadIdx.x % 32;
    float most = __uint_as_float(0xFF800000u), sum = 0.0f;
    for (int e = lane; e < experts; e += 32) most = fmaxf(most, load(logits, dtype, at + e));
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, lanes));
    for (int e = lane; e < experts; e += 32) sum += expf(load(logits, dtype, at + e) - most);
    return {0, most, 1.0f / warp_sum(sum)};
}

// Marks the groups of a token that are kept, by a warp; `of_groups` is memory of it for twice as many. `value` gives what experts are compared
// by, or what is added.
template <typename Value>
__device__ __forceinline__ void keep_groups(float *of_groups, int groups, int kept, int by_two, int experts, Value value) {
    int lane = threadIdx.x % 32, size = experts / groups;
    float *scores = of_groups, *marks = of_groups + groups;
    // What an earlier token left there is still read.
    __syncwarp();
    for (int g = lane; g < groups; g += 32) {
        float most = __uint_as_float(0x7FC00000u), second = most;
        for (int e = g * size; e < (g + 1) * size; e++) {
            float x = value(e);
            if (x > most || (most != most && x == x)) second = most, most = x;
            else if (x > second || (second != second && x == x)) second = x;
        }
        scores[g] = by_two ? most + second : most;
    }
    __syncwarp();
    for (int g = lane; g < groups; g += 32) {
        int before = 0;
        for (int h = 0; h < groups; h++) before += h != g && comes_before(scores[h], h, scores[g], g);
        marks[g] = before < kept ? 1.0f : 0.0f;
    }
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(256)
experts_choose(const void *logits, int dtype, int sigmoid, int normalize, float scale, const float *bias, float *weights, int *chosen,
               i64 tokens, int experts, int choices, int groups, int kept, int by_two) {
    int lane = threadIdx.x % 32, size = groups ? experts / groups : experts;
    float *of_groups = (float *)dynamic_shared + threadIdx.x / 32 * 2 * groups, *marks = of_groups + groups;
    for (i64 t = (i64)blockIdx.x * WARPS + threadIdx.x / 32; t < tokens; t += (i64)gridDim.x * WARPS) {
        i64 at = t * experts, to = t * choices;
        RowScores scores = warp_scores(logits, dtype, sigmoid, at, experts);
        if (groups)
            keep_groups(of_groups, groups, kept, by_two, experts, [&](int e) {
                float x = load(logits, dtype, at + e);
                return bias ? scores.of(x) + bias[e] : by_two ? scores.of(x) : x;
            });
        float last = 0.0f, sum = 0.0f;
        int last_expert = -1;
        for (int j = 0; j < choices; j++) {
            float best = 0.0f;
            int best_expert = -1;
            for (int e = lane; e < experts; e += 32) {
                if (groups && marks[e / size] == 0.0f) continue;
                float x = load(logits, dtype, at + e);
                if (bias) x = scores.of(x) + bias[e];
                if (last_expert >= 0 && !comes_before(last, last_expert, x, e)) continue;
                if (best_expert < 0 || comes_before(x, e, best, best_expert)) best = x, best_expert = e;
            }
#pragma unroll
            for (int lanes = 16; lanes > 0; lanes /= 2) {
                float x = __shfl_xor_sync(ALL_LANES, best, lanes);
                int e = __shfl_xor_sync(ALL_LANES, best_expert, lanes);
                if (e >= 0 && (best_expert < 0 || comes_before(x, e, best, best_expert))) best = x, best_expert = e;
            }
            last = best, last_expert = best_expert;
            float p = scores.of(bias ? load(logits, dtype, at + best_expert) : best);
            sum += p;
            if (lane == 0) chosen[to + j] = best_expert, weights[to + j] = p;
        }
        if (lane == 0)
            for (int j = 0; j < choices; j++) weights[to + j] = (normalize ? weights[to + j] / sum : weights[to + j]) * scale;
    }
}

extern "C" __global__ void __launch_bounds__(256) experts_count(const int *chosen, int *starts, i64 routed, int experts) {
    __shared__ int warps[33];
    for (int e = blockIdx.x; e < experts; e += gridDim.x) {
        int count = 0;
        for (i64 i = threadIdx.x; i < routed; i += 256) count += chosen[i] == e;
        count = block_sum(count, warps);
        if (threadIdx.x == 0) starts[e + 1] = count;
    }
}

// One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) experts_starts(int *starts, int experts) {
    __shared__ int stretch[256];
    int sum = 0;
    for (int first = 1; first <= experts; first += 256) {
        int at = first + threadIdx.x;
        if (at <= experts) stretch[threadIdx.x] = starts[at];
        __syncthreads();
        if (threadIdx.x == 0)
            for (int i = 0; i < 256 && first + i <= experts; i++) stretch[i] = sum += stretch[i];
        __syncthreads();
        if (at <= experts) starts[at] = stretch[threadIdx.x];
    }
    if (threadIdx.x == 0) starts[0] = 0;
}

extern "C" __global__ void __launch_bounds__(256)
experts_rows(const int *chosen, const int *starts, int *rows, i64 routed, int experts) {
    // Choices of the expert in each warp, of two stretches in turn: one is read while the next is written.
    __shared__ int counts[2][WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, turn = 0;
    for (int e = blockIdx.x; e < experts; e += gridDim.x) {
        int next = starts[e];
        for (i64 start = 0; start < routed; start += 256, turn ^= 1) {
            i64 i = start + threadIdx.x;
            bool mine = i < routed && chosen[i] == e;
            unsigned votes = __ballot_sync(ALL_LANES, mine);
            if (lane == 0) counts[turn][warp] = __popc(votes);
            __syncthreads();
            int before = 0, total = 0;
            for (int w = 0; w < WARPS; w++) {
                if (w < warp) before += counts[turn][w];
                total += counts[turn][w];
            }
            if (mine) rows[i] = next + before + __popc(votes & ((1u << lane) - 1));
            next += total;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
experts_route_backward(const void *logits, int dtype, int sigmoid, int normalize, float scale, const float *weights, const int *chosen,
                       const float *dweights, void *dlogits, int dlogits_dtype, i64 tokens, int experts, int choices) {
    int lane = threadIdx.x % 32;
    for (i64 t = (i64)blockIdx.x * WARPS + threadIdx.x / 32; t < tokens; t += (i64)gridDim.x * WARPS) {
        i64 at = t * experts, of = t * choices;
        RowScores scores = warp_scores(logits, dtype, sigmoid, at, experts);
        float inverse = 1.0f, mean = 0.0f;
        if (normalize) {
            float chosen_sum = 0.0f;
            for (int j = lane; j < choices; j += 32) {
                chosen_sum += scores.of(load(logits, dtype, at + chosen[of + j]));
                mean += dweights[of + j] * weights[of + j];
            }
            inverse = 1.0f / warp_sum(chosen_sum), mean = warp_sum(mean);
        }
        float inner = 0.0f;
        for (int j = lane; j < choices; j += 32)
            inner += scores.of(load(logits, dtype, at + chosen[of + j])) * ((scale * dweights[of + j] - mean) * inverse);
        inner = warp_sum(inner);
        for (int e = lane; e < experts; e += 32) {
            float g = 0.0f;
            for (int j = 0; j < choices; j++)
                if (chosen[of + j] == e) g = (scale * dweights[of + j] - mean) * inverse;
            float p = scores.of(load(logits, dtype, at + e));
            store(dlogits, dlogits_dtype, at + e, sigmoid ? p * (1.0f - p) * g : p * (g - inner));
        }
    }
}

// Eight columns of a row at a time, or what is left of it.
#define FOR_EIGHTS(c, width) for (i64 c = 8 * threadIdx.x; c < (width); c += 8 * blockDim.x)

extern "C" __global__ void __launch_bounds__(256)
experts_spread(const void *x, int x_dtype, const int *rows, void *out, int out_dtype, i64 tokens, int choices, i64 width) {
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(out);
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float v[8];
            load8_or_less(x, x_dtype, t * width + c, count, vector, v);
            for (int j = 0; j < choices; j++)
                store8_or_less(out, out_dtype, rows[t * choices + j] * width + c, count, vector, v);
        }
    }
}

// The residual may be null, and may be `out`: its elements are read by the thread that writes them.
extern "C" __global__ void __launch_bounds__(256)
experts_collect(const void *x, int x_dtype, const int *rows, const void *residual, int residual_dtype, void *out, int out_dtype,
                i64 tokens, int choices, i64 width) {
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(out) && aligned16(residual);
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float sum[8] = {}, v[8];
            for (int j = 0; j < choices; j++) {
                load8_or_less(x, x_dtype, rows[t * choices + j] * width + c, count, vector, v);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] += v[i];
            }
            if (residual) {
                load8_or_less(residual, residual_dtype, t * width + c, count, vector, v);
#pragma unroll
                for (int i = 0; i < 8; i++) sum[i] += v[i];
            }
            store8_or_less(out, out_dtype, t * width + c, count, vector, sum);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
experts_weigh(const void *x, int x_dtype, const int *rows, const float *weights, void *out, int out_dtype, i64 routed, i64 width) {
    bool vector = width % 8 == 0 && aligned16(x) && aligned16(out);
    for (i64 i = blockIdx.x; i < routed; i += gridDim.x) {
        i64 at = rows[i] * width;
        float weight = weights[i];
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float v[8];
            load8_or_less(x, x_dtype, at + c, count, vector, v);
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] *= weight;
            store8_or_less(out, out_dtype, at + c, count, vector, v);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
experts_weigh_backward(void *d, int d_dtype, const void *x, int x_dtype, const int *rows, const float *weights, float *dweights,
                       i64 routed, i64 width) {
    __shared__ float warps[33];
    bool vector = width % 8 == 0 && aligned16(d) && aligned16(x);
    for (i64 i = blockIdx.x; i < routed; i += gridDim.x) {
        i64 at = rows[i] * width;
        float weight = weights[i], sum = 0.0f;
        FOR_EIGHTS(c, width) {
            int count = (int)min(width - c, (i64)8);
            float of_d[8], of_x[8];
            load8_or_less(d, d_dtype, at + c, count, vector, of_d);
            load8_or_less(x, x_dtype, at + c, count, vector, of_x);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += of_d[j] * of_x[j], of_d[j] *= weight;
            store8_or_less(d, d_dtype, at + c, count, vector, of_d);
        }
        sum = block_sum(sum, warps);
        if (threadIdx.x == 0) dweights[i] = sum;
    }
}
