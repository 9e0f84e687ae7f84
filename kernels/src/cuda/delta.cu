// The layer around the gated delta rule (Yang et al., arXiv 2412.06464); the rule itself is in delta_scan.cu.
//
//   delta_convolve           out[b, s, c] = silu(Σ_w weight[c, w]·x[b, s − taps + 1 + w, c]), w ascending
//   delta_convolve_state     state = the last taps − 1 inputs of each sequence, up to its last token
//   delta_convolve_backward  dx = the gradient of x, dweight += that of weights
//   delta_gates              decay = −exp(a_log)·softplus(a + dt_bias),  beta = σ(b)
//   delta_gates_backward     da, db = their gradients
//   delta_gates_sums         da_log, ddt_bias += their gradients
//
// Shapes: x and out [sequences, length, channels]; weight [channels, taps], at most 32 taps; state [slots, taps − 1, channels], of x's dtype; a, b,
// decay and beta [tokens, heads]; a_log and dt_bias [heads]. decay, beta, their gradients and those of weights, a_log and dt_bias are f32.
//
// A thread of `delta_convolve` takes eight channels through POSITIONS positions; with four taps, as everybody has, weights and the last
// inputs stay in registers. Bytes: x and out once, and the inputs before each POSITIONS again. 2·taps FLOPs an element and a SiLU.
//
// A block of `delta_convolve_backward` takes 32 channels and all rows, TILE_ROWS at a time: the sums before the SiLU are computed again, their gradients
// in shared memory are what gradients of inputs and weights are made of. Sums over rows: of each tile in order, and the tiles in
// order. channels/32 blocks are busy; more would need memory for partial sums. Bytes: x, dout and dx once.

#define TAPS_MAX 32
#define POSITIONS 16

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// ln(1 + exp(x)), which above 20 is x in f32. A NaN is in the exponential.
__device__ __forceinline__ float softplus(float x) { return fmaxf(x, 0.0f) + log1pf(expf(-fabsf(x))); }

// What is before a sequence: the rows of its state, or zeros.
struct Before {
    // Null: zeros.
    const void *state;
    int dtype;
    // Where the first row of the sequence's slot begins.
    i64 at;
};

__device__ __forceinline__ Before before_of(const void *state, int dtype, const int *slots, const int *starts, i64 b, i64 slot_size) {
    if (!state || starts[b] == 0) return {nullptr, dtype, 0};
    return {state, dtype, slots[b] * slot_size};
}

// Eight channels of a position, or of what is before the sequence, where it is `kept` rows at most.
__device__ __forceinline__ void input8(const void *x, int dtype, i64 sequence_at, const Before &before, i64 position, int kept,
                                       i64 channels, i64 c, int count, bool vector, float v[8]) {
    if (position >= 0) {
        load8_or_less(x, dtype, sequence_at + position * channels + c, count, vector, v);
    } else if (before.state) {
        load8_or_less(before.state, before.dtype, before.at + (position + kept) * channels + c, count, vector, v);
    } else {
#pragma unroll
        for (int j = 0; j < 8; j++) v[j] = 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(256)
delta_convolve(const void *x, int x_dtype, const void *weight, int weight_dtype, const void *state, int state_dtype, const int *slots,
               const int *starts, void *out, int out_dtype, i64 sequences, i64 length, i64 channels, int taps) {
    bool vector = channels % 8 == 0 && aligned16(x) && aligned16(out) && aligned16(state);
    int kept = taps - 1;
    i64 eights = (channels + 7) / 8, runs = (length + POSITIONS - 1) / POSITIONS;
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 item = thread; item < sequences * runs * eights; item += threads) {
        i64 c = item % eights * 8, first = item / eights % runs * POSITIONS, b = item / eights / runs;
        i64 end = min(first + POSITIONS, length), at = b * length * channels;
        int count = (int)min(channels - c, (i64)8);
        Before before = before_of(state, state_dtype, slots, starts, b, kept * channels);
        if (taps == 4) {
            float w[4][8], window[4][8];
#pragma unroll
            for (int j = 0; j < 8; j++)
#pragma unroll
                for (int t = 0; t < 4; t++) w[t][j] = j < count ? load(weight, weight_dtype, (c + j) * 4 + t) : 0.0f;
#pragma unroll
            for (int t = 0; t < 3; t++) input8(x, x_dtype, at, before, first - 3 + t, 3, channels, c, count, vector, window[t]);
            for (i64 s = first; s < end; s++) {
                float sum[8];
                input8(x, x_dtype, at, before, s, 3, channels, c, count, vector, window[3]);
#pragma unroll
                for (int j = 0; j < 8; j++) {
                    sum[j] = 0.0f;
#pragma unroll
                    for (int t = 0; t < 4; t++) sum[j] = fmaf(w[t][j], window[t][j], sum[j]);
                    sum[j] *= sigmoid(sum[j]);
#pragma unroll
                    for (int t = 0; t < 3; t++) window[t][j] = window[t + 1][j];
                }
                store8_or_less(out, out_dtype, at + s * channels + c, count, vector, sum);
            }
            continue;
        }
        for (i64 s = first; s < end; s++) {
            float sum[8] = {}, v[8];
            for (int t = 0; t < taps; t++) {
                input8(x, x_dtype, at, before, s - kept + t, kept, channels, c, count, vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (j < count) sum[j] = fmaf(load(weight, weight_dtype, (c + j) * taps + t), v[j], sum[j]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) sum[j] *= sigmoid(sum[j]);
            store8_or_less(out, out_dtype, at + s * channels + c, count, vector, sum);
        }
    }
}

// After all that read states. A thread moves the rows of a channel up, from the oldest on, each from a later place.
extern "C" __global__ void __launch_bounds__(256)
delta_convolve_state(const void *x, int x_dtype, void *state, int state_dtype, const int *slots, const int *starts, const int *last,
                     i64 sequences, i64 length, i64 channels, int taps) {
    int kept = taps - 1;
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 item = thread; item < sequences * channels; item += threads) {
        i64 c = item % channels, b = item / channels, slot = slots[b] * (i64)kept;
        bool is_new = starts[b] == 0;
        i64 valid = max((i64)0, min(last[b] - b * length + 1, length));
        for (int i = 0; i < kept; i++) {
            i64 from = valid + i - kept;
            float v = 0.0f;
            if (from >= 0) {
                v = load(x, x_dtype, (b * length + from) * channels + c);
            } else if (!is_new) {
                v = load(state, state_dtype, (slot + valid + i) * channels + c);
            }
            store(state, state_dtype, (slot + i) * channels + c, v);
        }
    }
}

#define TILE_ROWS 32

extern "C" __global__ void __launch_bounds__(256)
delta_convolve_backward(const void *x, int x_dtype, const void *weight, int weight_dtype, const void *dout, int dout_dtype, void *dx,
                        int dx_dtype, float *dweight, i64 sequences, i64 length, i64 channels, int taps) {
    __shared__ float weights[TAPS_MAX][32];
    // Of positions first − kept … first + TILE_ROWS + kept.
    __shared__ float inputs[TILE_ROWS + 2 * (TAPS_MAX - 1)][32];
    // Of positions first … first + TILE_ROWS + kept; zeros beyond the sequence.
    __shared__ float dsums[TILE_ROWS + TAPS_MAX - 1][32];
    int lane = threadIdx.x % 32, y = threadIdx.x / 32, kept = taps - 1;
    for (i64 block = blockIdx.x; block * 32 < channels; block += gridDim.x) {
        i64 c = block * 32 + lane;
        bool there = c < channels;
        float totals[TAPS_MAX / 8] = {};
        for (int t = y; t < taps; t += 8) weights[t][lane] = there ? load(weight, weight_dtype, c * taps + t) : 0.0f;
        for (i64 b = 0; b < sequences; b++) {
            for (i64 first = 0; first < length; first += TILE_ROWS) {
                i64 at = b * length * channels + c;
                for (int i = y; i < TILE_ROWS + 2 * kept; i += 8) {
                    i64 position = first - kept + i;
                    bool inside = there && position >= 0 && position < length;
                    inputs[i][lane] = inside ? load(x, x_dtype, at + position * channels) : 0.0f;
                }
                __syncthreads();
                for (int i = y; i < TILE_ROWS + kept; i += 8) {
                    float gradient = 0.0f;
                    if (there && first + i < length) {
                        float sum = 0.0f;
                        for (int t = 0; t < taps; t++) sum = fmaf(weights[t][lane], inputs[i + t][lane], sum);
                        float share = sigmoid(sum);
                        gradient = load(dout, dout_dtype, at + (first + i) * channels) * share * fmaf(sum, 1.0f - share, 1.0f);
                    }
                    dsums[i][lane] = gradient;
                }
                __syncthreads();
                int rows = (int)min((i64)TILE_ROWS, length - first);
                for (int i = y; i < rows; i += 8) {
                    float sum = 0.0f;
                    for (int t = kept; t >= 0; t--) sum = fmaf(weights[t][lane], dsums[i + kept - t][lane], sum);
                    if (there) store(dx, dx_dtype, at + (first + i) * channels, sum);
                }
#pragma unroll
                for (int turn = 0; turn < TAPS_MAX / 8; turn++) {
                    int t = y + 8 * turn;
                    float sum = 0.0f;
                    if (t < taps)
                        for (int i = 0; i < rows; i++) sum = fmaf(dsums[i][lane], inputs[i + t][lane], sum);
                    totals[turn] += sum;
                }
                __syncthreads();
            }
        }
#pragma unroll
        for (int turn = 0; turn < TAPS_MAX / 8; turn++)
            if (there && y + 8 * turn < taps) dweight[c * taps + y + 8 * turn] += totals[turn];
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(256)
delta_gates(const void *a, int a_dtype, const void *b, int b_dtype, const void *a_log, int a_log_dtype, const void *dt_bias,
            int dt_bias_dtype, float *decay, float *beta, i64 tokens, i64 heads) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = thread; i < tokens * heads; i += threads) {
        i64 h = i % heads;
        decay[i] = -expf(load(a_log, a_log_dtype, h)) * softplus(load(a, a_dtype, i) + load(dt_bias, dt_bias_dtype, h));
        beta[i] = sigmoid(load(b, b_dtype, i));
    }
}

extern "C" __global__ void __launch_bounds__(256)
delta_gates_backward(const void *a, int a_dtype, const void *b, int b_dtype, const void *a_log, int a_log_dtype, const void *dt_bias,
                     int dt_bias_dtype, const float *ddecay, const float *dbeta, void *da, int da_dtype, void *db, int db_dtype,
                     i64 tokens, i64 heads) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = thread; i < tokens * heads; i += threads) {
        i64 h = i % heads;
        float x = load(a, a_dtype, i) + load(dt_bias, dt_bias_dtype, h);
        store(da, da_dtype, i, -expf(load(a_log, a_log_dtype, h)) * sigmoid(x) * ddecay[i]);
        // The slope is that of −b, too, and what is left of a share near 1 would have lost its digits.
        float share = sigmoid(-fabsf(load(b, b_dtype, i)));
        store(db, db_dtype, i, share * (1.0f - share) * dbeta[i]);
    }
}

// Sums as `sum_columns` takes them.
extern "C" __global__ void __launch_bounds__(1024)
delta_gates_sums(const void *a, int a_dtype, const void *a_log, int a_log_dtype, const void *dt_bias, int dt_bias_dtype,
                 const float *ddecay, float *da_log, float *ddt_bias, i64 tokens, i64 heads) {
    sum_columns(tokens, heads, da_log, [=](i64, i64 i) {
        i64 h = i % heads;
        float x = load(a, a_dtype, i) + load(dt_bias, dt_bias_dtype, h);
        return -expf(load(a_log, a_log_dtype, h)) * softplus(x) * ddecay[i];
    });
    sum_columns(tokens, heads, ddt_bias, [=](i64, i64 i) {
        i64 h = i % heads;
        float x = load(a, a_dtype, i) + load(dt_bias, dt_bias_dtype, h);
        return -expf(load(a_log, a_log_dtype, h)) * sigmoid(x) * ddecay[i];
    });
}
