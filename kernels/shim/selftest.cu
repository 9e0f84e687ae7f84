// What the shim must catch, and what it must get right. Kernels that are wrong on purpose end with `_wrong`.

extern __shared__ __align__(16) unsigned char dynamic_shared[];

// out[i] = x[n - 1 - i], through shared memory.
extern "C" __global__ void reverse(const int *x, int *out) {
    int *kept = (int *)dynamic_shared;
    kept[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void no_barrier_wrong(const int *x, int *out) {
    int *kept = (int *)dynamic_shared;
    kept[threadIdx.x] = x[threadIdx.x];
    out[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

// Every warp is held together by an operation of its own, which is no barrier for the others.
extern "C" __global__ void warp_barrier_wrong(const int *x, int *out) {
    int *kept = (int *)dynamic_shared;
    kept[threadIdx.x] = x[threadIdx.x];
    __syncwarp();
    out[threadIdx.x] = kept[blockDim.x - 1 - threadIdx.x];
}

extern "C" __global__ void beyond_shared_wrong(const int *, int *) { ((int *)dynamic_shared)[blockDim.x] = 1; }

extern "C" __global__ void two_barriers_wrong(const int *, int *) {
    if (threadIdx.x == 0) {
        __syncthreads();
    } else {
        __syncthreads();
    }
}

extern "C" __global__ void missing_lane_wrong(const int *x, int *out) {
    if (threadIdx.x != 3) out[threadIdx.x] = __shfl_xor_sync(0xFFFFFFFFu, x[threadIdx.x], 1);
}

extern "C" __global__ void copy_without_wait_wrong(const int *x, int *out) {
    int *kept = (int *)dynamic_shared;
    terrace_shim::copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x, 16, 16);
    terrace_shim::copy_commit();
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = kept[4 * threadIdx.x + i];
}

extern "C" __global__ void copy_and_wait(const int *x, int *out) {
    int *kept = (int *)dynamic_shared;
    terrace_shim::copy_async(kept + 4 * threadIdx.x, x + 4 * threadIdx.x, 16, 16);
    terrace_shim::copy_commit();
    terrace_shim::copy_wait(0);
    for (int i = 0; i < 4; i++) out[4 * threadIdx.x + i] = kept[4 * threadIdx.x + i];
}

// A scan by shuffles: out[i] = x[0] + … + x[i].
extern "C" __global__ void scan(const int *x, int *out) {
    int sum = x[threadIdx.x];
    for (unsigned lanes = 1; lanes < 32; lanes *= 2) {
        int other = __shfl_up_sync(0xFFFFFFFFu, sum, lanes);
        if (threadIdx.x >= lanes) sum += other;
    }
    out[threadIdx.x] = sum;
}

// d[16, 8] = a[16, 16] · b[16, 8] in bf16 from shared memory: both operands row by row, so b is transposed on the way.
extern "C" __global__ void one_mma(const unsigned short *a, const unsigned short *b, float *d) {
    unsigned short *a_kept = (unsigned short *)dynamic_shared, *b_kept = a_kept + 256;
    for (int i = threadIdx.x; i < 256; i += 32) a_kept[i] = a[i];
    for (int i = threadIdx.x; i < 128; i += 32) b_kept[i] = b[i];
    __syncwarp();
    unsigned lane = threadIdx.x, a_registers[4], b_registers[2];
    terrace_shim::ldmatrix<4, false>(a_registers, a_kept + lane % 16 * 16 + lane / 16 * 8);
    terrace_shim::ldmatrix<2, true>(b_registers, b_kept + lane % 16 * 8);
    float sums[4] = {};
    terrace_shim::mma_m16n8k16<false>(sums, a_registers, b_registers, sums);
    for (int i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
