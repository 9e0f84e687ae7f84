// SwiGLU (Shazeer, arXiv 2002.05202), with σ = 1 / (1 + exp(−gate)):
//
//   swiglu_forward    out = gate·σ·up
//   swiglu_backward   dgate = dout·up·σ·(1 + gate·(1 − σ)),  dup = dout·gate·σ
//
// All operands have n elements. Bytes: three and five operands once. About 10 and 15 FLOPs an element, an exponential
// among them, in f32. Far from zero σ is 0 or 1, never NaN: exp overflows to infinity.

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

extern "C" __global__ void __launch_bounds__(256)
swiglu_forward(const void *gate, int gate_dtype, const void *up, int up_dtype, void *out, int out_dtype, i64 n) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    i64 vectors = aligned16(gate) && aligned16(up) && aligned16(out) ? n / 8 : 0;
    for (i64 v = thread; v < vectors; v += threads) {
        float g[8], u[8];
        load8(gate, gate_dtype, 8 * v, g);
        load8(up, up_dtype, 8 * v, u);
#pragma unroll
        for (int j = 0; j < 8; j++) u[j] *= g[j] * sigmoid(g[j]);
        store8(out, out_dtype, 8 * v, u);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) {
        float g = load(gate, gate_dtype, i);
        store(out, out_dtype, i, load(up, up_dtype, i) * (g * sigmoid(g)));
    }
}

// The results may be the operands.
__device__ __forceinline__ void swiglu_gradient(float gate, float up, float dout, float &dgate, float &dup) {
    float sigma = sigmoid(gate);
    dgate = dout * up * sigma * (1.0f + gate * (1.0f - sigma));
    dup = dout * (gate * sigma);
}

extern "C" __global__ void __launch_bounds__(256)
swiglu_backward(const void *gate, int gate_dtype, const void *up, int up_dtype, const void *dout, int dout_dtype,
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
        for (int j = 0; j < 8; j++) swiglu_gradient(g[j], u[j], d[j], g[j], u[j]);
        store8(dgate, dgate_dtype, 8 * v, g);
        store8(dup, dup_dtype, 8 * v, u);
    }
    for (i64 i = 8 * vectors + thread; i < n; i += threads) {
        float g, u;
        swiglu_gradient(load(gate, gate_dtype, i), load(up, up_dtype, i), load(dout, dout_dtype, i), g, u);
        store(dgate, dgate_dtype, i, g);
        store(dup, dup_dtype, i, u);
    }
}
