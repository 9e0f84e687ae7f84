// Softmax cross-entropy over rows of logits [rows, classes] with labels [rows]; a negative label leaves its row out.
//
//   cross_entropy_rows   losses[r] = lse(logits[r]) − logits[r, labels[r]], 0 if left out; and, with `gradient`,
//                        logits[r] ← scale·(softmax(logits[r]) − onehot(labels[r]))·(1 − (logits[r]·inverse_cap)²), 0 if left
//                        out; an inverse_cap of 0 for logits without a cap changes no bit
//   cross_entropy_add    loss[0] += losses[r], r ascending, in f64
//
// A block takes a row, or several one after the other. Bytes: logits once, with gradient also written once and read once
// more, mostly from the L2 cache (a row of 150 Ki bf16 logits is 300 KiB). FLOPs: an exponential, or two, and about 5 an
// element.
//
// The maximum and the sum of exponentials are found in one pass (Milakov and Gimelshein, arXiv 1805.02867), eight elements
// at a time, in f32 for each thread; threads are added and the logarithm is taken in f64, since a loss is a small
// difference of large numbers. The gradient is expf(x − max)/sum. The loss has the same bits with and without gradient.

// A maximum and Σ exp(x − maximum). The smallest finite f32 stands for "nothing yet", so that −∞ adds zero.
struct Softmax {
    float most;
    double sum;
};

#define NOTHING_YET -3.402823466e38f

__device__ __forceinline__ Softmax merged(Softmax a, Softmax b) {
    float most = fmaxf(a.most, b.most);
    return {most, a.sum * (double)expf(a.most - most) + b.sum * (double)expf(b.most - most)};
}

// Pairs of lanes, the lower one's first, so that all lanes get the same bits.
__device__ __forceinline__ Softmax warp_merged(Softmax x) {
#pragma unroll
    for (int lanes = 1; lanes < 32; lanes *= 2) {
        Softmax other = {__shfl_xor_sync(ALL_LANES, x.most, lanes), __shfl_xor_sync(ALL_LANES, x.sum, lanes)};
        x = threadIdx.x & lanes ? merged(other, x) : merged(x, other);
    }
    return x;
}

// For every thread, by lanes and then by warps. `warps` has 32 elements; a call may follow another at once.
__device__ __forceinline__ Softmax block_merged(Softmax x, Softmax *warps) {
    x = warp_merged(x);
    unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (lane == 0) warps[warp] = x;
    __syncthreads();
    x = warp_merged(lane < blockDim.x / 32 ? warps[lane] : Softmax{NOTHING_YET, 0.0});
    __syncthreads();
    return x;
}

__device__ __forceinline__ Softmax row_softmax(const void *logits, int dtype, i64 at, i64 classes, bool vector) {
    float most = NOTHING_YET, sum = 0.0f;
    for (i64 c = 8 * threadIdx.x; c < classes; c += 8 * blockDim.x) {
        int count = (int)min(classes - c, (i64)8);
        float x[8];
        load8_or_less(logits, dtype, at + c, count, vector, x);
        float most_here = most;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < count) most_here = fmaxf(most_here, x[j]);
        sum *= expf(most - most_here);
        most = most_here;
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (j < count) sum += expf(x[j] - most);
    }
    return {most, (double)sum};
}

extern "C" __global__ void __launch_bounds__(1024)
cross_entropy_rows(void *logits, int dtype, const int *labels, int gradient, float scale, float inverse_cap,
                   double *losses, i64 rows, i64 classes) {
    __shared__ Softmax warps[32];
    bool vector = classes % 8 == 0 && aligned16(logits);
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * classes;
        int label = labels[row];
        Softmax softmax = {0.0f, 1.0};
        float inverse = 0.0f;
        if (label >= 0) {
            softmax = block_merged(row_softmax(logits, dtype, at, classes, vector), warps);
            inverse = (float)(1.0 / softmax.sum);
        }
        if (threadIdx.x == 0) {
            double loss = 0.0;
            if (label >= 0) loss = (double)softmax.most + log(softmax.sum) - (double)load(logits, dtype, at + label);
            losses[row] = loss;
        }
        // The label's logit is read before it is replaced.
        __syncthreads();
        if (!gradient) continue;
        for (i64 c = 8 * threadIdx.x; c < classes; c += 8 * blockDim.x) {
            int count = (int)min(classes - c, (i64)8);
            float x[8];
            load8_or_less(logits, dtype, at + c, count, vector, x);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float p = expf(x[j] - softmax.most) * inverse;
                float t = x[j] * inverse_cap, slope = 1.0f - t * t;
                x[j] = label < 0 ? 0.0f : scale * (c + j == label ? p - 1.0f : p) * slope;
            }
            store8_or_less(logits, dtype, at + c, count, vector, x);
        }
    }
}

// One block of 256 threads.
extern "C" __global__ void __launch_bounds__(256) cross_entropy_add(const double *losses, i64 rows, double *loss) {
    add_in_order(losses, rows, loss);
}
