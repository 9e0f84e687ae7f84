// Gated activations (Shazeer, arXiv 2002.05202), with f(x) = x·share(x), or share(x) alone:
//
//   gated_forward    out = f(gate)·up
//   gated_backward   dgate = dout·up·f'(gate),  dup = dout·f(gate)
//
//   SILU        share = σ(x) = 1 / (1 + exp(−x))
//   GELU        share = Φ(x) = ½·erfc(−x/√2)                                    Hendrycks and Gimpel, arXiv 1606.08415
//   GELU_TANH   share = ½(1 + tanh u) = σ(2u),  u = √(2/π)·(x + 0.044715·x³)    their approximation
//   CLAMPED_SWISH  share = σ(1.702·x)                                           OpenAI, arXiv 2508.10925
//   SIGMOID     share = σ(x), alone                                             Dauphin et al., arXiv 1612.08083
//
// The last but one holds the gate below 7 and up between −7 and 7 first, and adds 1 to up; what was beyond has a gradient of 0.
//
// All operands have n elements. Bytes: three and five operands once. About 10 and 15 FLOPs an element (20 and 30 of GELU), an
// exponential or an error function among them, in f32. The branch is the same for all threads. Far from zero a share is 0 or
// 1, never NaN: exp overflows to infinity.

// Codes of `GateFunction`; kernels/src/cuda/operand.rs has the same.
enum { SILU = 0, GELU = 1, GELU_TANH = 2, CLAMPED_SWISH = 3, SIGMOID = 4 };

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// 2√(2/π), and 0.044715 times that.
#define TANH_LINEAR 1.5957692f
#define TANH_CUBIC 0.07135481f

// x held where σ(2u) is 0 or 1 in f32 and nothing overflows. NaN stays.
__device__ __forceinline__ float within(float x) { return x > 16.0f ? 16.0f : x < -16.0f ? -16.0f : x; }

// `SWISH_SLOPE` and `SWISH_LIMIT` of `GateFunction`.
#define SWISH_SLOPE 1.702f
#define SWISH_LIMIT 7.0f

// x up to the limit. NaN stays, which it would not of fminf.
__device__ __forceinline__ float at_most(float x) { return x > SWISH_LIMIT ? SWISH_LIMIT : x; }

// What is done to the operands before all else.
__device__ __forceinline__ void hold(int function, float &gate, float &up) {
    if (function != CLAMPED_SWISH) return;
    gate = at_most(gate);
    up = -at_most(-at_most(up)) + 1.0f;
}

__device__ __forceinline__ float share_of(int function, float x) {
    if (function == GELU) return 0.5f * erfcf(x * -0.70710678f);
    if (function == CLAMPED_SWISH) return sigmoid(SWISH_SLOPE * x);
    if (function == GELU_TANH) {
        x = within(x);
        x = x * (TANH_LINEAR + TANH_CUBIC * (x * x));
    }
    return sigmoid(x);
}

__device__ __forceinline__ float function_of(int function, float x) {
    float share = share_of(function, x);
    return function == SIGMOID ? share : x * share;
}

extern "C" __global__ void __launch_bounds__(256)
gated_forward(int function, const void *gate, int gate_dtype, const void *up, int up_dtype, void *out, int out_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 vectors = aligned16(gate) && aligned16(up) && aligned16(out) ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float g[8], u[8];
        load8(gate, gate_dtype, 8 * v, g);
        load8(up, up_dtype, 8 * v, u);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            hold(function, g[j], u[j]);
            u[j] *= function_of(function, g[j]);
        }
        store8(out, out_dtype, 8 * v, u);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) {
        float g = load(gate, gate_dtype, i), u = load(up, up_dtype, i);
        hold(function, g, u);
        store(out, out_dtype, i, u * function_of(function, g));
    }
}

// The results may be the operands.
__device__ __forceinline__ void gradient(int function, float gate, float up, float dout, float &dgate, float &dup) {
    bool is_beyond = gate > SWISH_LIMIT, up_is_beyond = fabsf(up) > SWISH_LIMIT;
    hold(function, gate, up);
    float share = share_of(function, gate), x = gate;
    dup = dout * (function == SIGMOID ? share : gate * share);
    if (function == CLAMPED_SWISH) {
        // Far below zero a share of 0 comes first: nothing overflows.
        float slope = share + share * (1.0f - share) * SWISH_SLOPE * x;
        dgate = is_beyond ? 0.0f : dout * up * slope;
        dup = up_is_beyond ? 0.0f : dup;
        return;
    }
    if (function == SIGMOID) {
        dgate = dout * up * (share * (1.0f - share));
        return;
    }
    if (function == SILU) {
        dgate = dout * up * share * (1.0f + x * (1.0f - share));
        return;
    }
    if (function == GELU) {
        // exp(-x²/2) / √(2π)
        dgate = dout * up * (share + x * (0.3989423f * expf(-0.5f * (x * x))));
        return;
    }
    x = within(x);
    dgate = dout * up * (share + share * (1.0f - share) * (x * (TANH_LINEAR + 3.0f * TANH_CUBIC * (x * x))));
}

extern "C" __global__ void __launch_bounds__(256)
gated_backward(int function, const void *gate, int gate_dtype, const void *up, int up_dtype, const void *dout, int dout_dtype,
                void *dgate, int dgate_dtype, void *dup, int dup_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    bool vector = aligned16(gate) && aligned16(up) && aligned16(dout) && aligned16(dgate) && aligned16(dup);
    i64 vectors = vector ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float g[8], u[8], d[8];
        load8(gate, gate_dtype, 8 * v, g);
        load8(up, up_dtype, 8 * v, u);
        load8(dout, dout_dtype, 8 * v, d);
#pragma unroll
        for (int j = 0; j < 8; j++) gradient(function, g[j], u[j], d[j], g[j], u[j]);
        store8(dgate, dgate_dtype, 8 * v, g);
        store8(dup, dup_dtype, 8 * v, u);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) {
        float g, u;
        gradient(function, load(gate, gate_dtype, i), load(up, up_dtype, i), load(dout, dout_dtype, i), g, u);
        store(dgate, dgate_dtype, i, g);
        store(dup, dup_dtype, i, u);
    }
}
