// The gated delta rule (Yang et al., arXiv 2412.06464): states S [K, V] of every sequence and value head, from position to position.
//
//   delta_scan_N     S = g·S,  δ = beta·(v − Sᵀk̂),  S = S + k̂·δᵀ,  out = Sᵀq̂,  with g = exp(decay), forward
//   delta_begin_N    the states at the beginnings of stretches, of the pairs (b, h) of a wave
//   delta_back_N     the states of a stretch, and back through it: what columns add to gradients
//   delta_finish     gradients of queries, keys and gates, from the sums of columns and of the value heads of a key head
//
// N is 64, 128 or 256: K at most. Shapes: qkv [sequences, length, 2·G·K + H·V]; decay and beta f32 [sequences·length, H]; out and dout
// [sequences, length, H, V]; states [slots, H, K, V]. cpu/delta/backward.rs has the formulas of gradients, ops/delta.rs what is where in
// the scratch: of each part of a pair its states, of a state its elements as threads have them, and then sums.
//
// A block takes a part of a state, COLUMNS columns, for whole sequences or stretches. Four lanes have a column, whose rows they hold in registers, 4
// of each 16 in turn; sums over rows go from lane to lane, always in the same order. CHUNK positions at a time are normalized into shared
// memory. 7·K·V FLOPs a position and head, and no bytes but those of positions: what limits it is how long a position takes, two sums
// over rows and what is between them. Backward also reads and writes a state for each position: 8·K·V bytes.
//
// Sums over columns, backward, are of vectors over K: lanes of a warp exchange halves of what they have until each has a share of the
// rows, of the warp's eight columns; then warps are added in their order, parts and heads in theirs by `delta_finish`.

// kernels/src/cuda/delta.rs has the same, and Waves::COLUMNS of ops/delta.rs.
#define COLUMNS 32
#define LANES 4
#define SCAN_THREADS (COLUMNS * LANES)
#define SCAN_WARPS (SCAN_THREADS / 32)
// Positions that are normalized at a time.
#define CHUNK 16

// Of ops/delta.rs.
#define SQUARES_EPS 1e-6f

// What all kernels read, and its sizes.
struct Scan {
    const void *qkv;
    int dtype;
    const float *decay, *beta;
    i64 sequences, length;
    int key_heads, heads, keys, values;

    __device__ __forceinline__ i64 channels() const { return 2 * (i64)key_heads * keys + (i64)heads * values; }
    __device__ __forceinline__ i64 q(i64 row, int g) const { return row * channels() + (i64)g * keys; }
    __device__ __forceinline__ i64 k(i64 row, int g) const { return q(row, key_heads + g); }
    __device__ __forceinline__ i64 v(i64 row, int h) const { return q(row, 2 * key_heads) + (i64)h * values; }
    __device__ __forceinline__ i64 out(i64 row, int h) const { return (row * heads + h) * values; }
    __device__ __forceinline__ i64 gate(i64 row, int h) const { return row * heads + h; }
    __device__ __forceinline__ int key_head(int h) const { return h / (heads / key_heads); }
};

// Positions in shared memory. K is at most KEYS; beyond K there are zeros.
template <int KEYS> struct Chunk {
    __align__(16) float q[CHUNK][KEYS];
    __align__(16) float k[CHUNK][KEYS];
    float factor[CHUNK], beta[CHUNK], query_key[CHUNK];
};

// 1/√(Σx² + eps) of a vector that a warp has.
template <int EACH> __device__ __forceinline__ float reciprocal_norm(const float x[EACH]) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < EACH; i++) squares = fmaf(x[i], x[i], squares);
    return 1.0f / sqrtf(warp_sum(squares) + SQUARES_EPS);
}

// Reads rows first … first + count of a head, a warp a row. Between barriers.
template <int KEYS>
__device__ __forceinline__ void load_chunk(const Scan &scan, Chunk<KEYS> &chunk, i64 first, int count, int h) {
    const int EACH = KEYS / 32;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = scan.key_head(h);
    float scale = 1.0f / sqrtf((float)scan.keys);
    for (int p = warp; p < count; p += SCAN_WARPS) {
        float q[EACH], k[EACH], product = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            int at = lane + 32 * i;
            q[i] = at < scan.keys ? load(scan.qkv, scan.dtype, scan.q(first + p, g) + at) : 0.0f;
            k[i] = at < scan.keys ? load(scan.qkv, scan.dtype, scan.k(first + p, g) + at) : 0.0f;
        }
        float of_q = scale * reciprocal_norm<EACH>(q), of_k = reciprocal_norm<EACH>(k);
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            q[i] *= of_q, k[i] *= of_k;
            chunk.q[p][lane + 32 * i] = q[i];
            chunk.k[p][lane + 32 * i] = k[i];
            product = fmaf(q[i], k[i], product);
        }
        product = warp_sum(product);
        if (lane == 0) {
            chunk.query_key[p] = product;
            chunk.factor[p] = expf(scan.decay[scan.gate(first + p, h)]);
            chunk.beta[p] = scan.beta[scan.gate(first + p, h)];
        }
    }
}

// The sum over the lanes of a column, for all of them.
__device__ __forceinline__ float column_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

// The row of element `i` of a lane of a column.
__device__ __forceinline__ int row_of(int i, int lane) { return 16 * (i / 4) + 4 * lane + i % 4; }

// A lane's part of a vector in shared memory.
template <int N> __device__ __forceinline__ void lane_part(const float *vector, int lane, float part[N]) {
#pragma unroll
    for (int m = 0; m < N / 4; m++) {
        float4 four = *(const float4 *)(vector + 16 * m + 4 * lane);
        part[4 * m] = four.x, part[4 * m + 1] = four.y, part[4 * m + 2] = four.z, part[4 * m + 3] = four.w;
    }
}

// A column through a position. Gives δ.
template <int N> __device__ __forceinline__ float advance(float state[N], const float k[N], float v, float factor, float beta) {
    float held = 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) held = fmaf(state[i], k[i], held);
    float delta = beta * (v - factor * column_sum(held));
#pragma unroll
    for (int i = 0; i < N; i++) state[i] = fmaf(k[i], delta, factor * state[i]);
    return delta;
}

template <int KEYS>
__device__ __forceinline__ void scan_forward(const Scan &scan, float *states, const int *slots, const int *starts, const int *last, void *out,
                                             int out_dtype) {
    const int N = KEYS / LANES;
    __shared__ Chunk<KEYS> chunk;
    int column = threadIdx.x / LANES, lane = threadIdx.x % LANES, parts = (scan.values + COLUMNS - 1) / COLUMNS;
    for (i64 item = blockIdx.x; item < scan.sequences * scan.heads * parts; item += gridDim.x) {
        int c = (int)(item % parts) * COLUMNS + column, h = (int)(item / parts % scan.heads);
        i64 b = item / parts / scan.heads, start = b * scan.length, valid = scan.length, at = 0;
        bool there = c < scan.values, is_new = true;
        float state[N], k[N], q[N];
        if (states) {
            valid = max((i64)0, min(last[b] - start + 1, scan.length));
            is_new = starts[b] == 0;
            at = ((i64)slots[b] * scan.heads + h) * scan.keys * scan.values + c;
        }
#pragma unroll
        for (int i = 0; i < N; i++) {
            int row = row_of(i, lane);
            state[i] = there && !is_new && row < scan.keys ? states[at + (i64)row * scan.values] : 0.0f;
        }
        for (i64 first = 0; first < valid; first += CHUNK) {
            int count = (int)min(valid - first, (i64)CHUNK);
            __syncthreads();
            load_chunk(scan, chunk, start + first, count, h);
            __syncthreads();
            for (int p = 0; p < count; p++) {
                i64 row = start + first + p;
                float v = there ? load(scan.qkv, scan.dtype, scan.v(row, h) + c) : 0.0f, sum = 0.0f;
                lane_part<N>(chunk.k[p], lane, k);
                advance<N>(state, k, v, chunk.factor[p], chunk.beta[p]);
                lane_part<N>(chunk.q[p], lane, q);
#pragma unroll
                for (int i = 0; i < N; i++) sum = fmaf(state[i], q[i], sum);
                sum = column_sum(sum);
                if (there && lane == 0) store(out, out_dtype, scan.out(row, h) + c, sum);
            }
        }
        for (i64 s = valid + lane; s < scan.length; s += LANES)
            if (there) store(out, out_dtype, scan.out(start + s, h) + c, 0.0f);
        if (!states || !there) continue;
#pragma unroll
        for (int i = 0; i < N; i++) {
            int row = row_of(i, lane);
            if (row < scan.keys) states[at + (i64)row * scan.values] = state[i];
        }
    }
}

// How a backward pass is cut up: `Waves` of ops/delta.rs.
struct Waves {
    float *scratch;
    // The first pair of the wave and how many it has.
    i64 first;
    int pairs, positions, stretches, parts, keys;

    __device__ __forceinline__ i64 of_sums() const { return 2 * (i64)keys + 2; }

    __device__ __forceinline__ i64 of_states(int values) const { return (stretches + positions) * (i64)keys * values; }

    __device__ __forceinline__ float *pair(int values, int place) const {
        return scratch + place * (of_states(values) + parts * (i64)positions * of_sums());
    }

    // The sums of a part of a pair at a position.
    __device__ __forceinline__ float *sums(int values, int place, int part, i64 position) const {
        return pair(values, place) + of_states(values) + (part * (i64)positions + position % positions) * of_sums();
    }
};

// A part of a pair of a wave, as a thread has it: a lane of a column.
struct Part {
    // Where its states begin, how many columns they have and how many elements of each column a lane has in memory.
    float *states;
    int columns, each;
    int place, part, h, c, lane;
    i64 start;
    bool there;

    __device__ __forceinline__ Part(const Scan &scan, const Waves &waves, i64 item) {
        place = (int)(item / waves.parts), part = (int)(item % waves.parts);
        lane = threadIdx.x % LANES;
        i64 pair = waves.first + place;
        h = (int)(pair % scan.heads);
        start = pair / scan.heads * scan.length;
        c = part * COLUMNS + threadIdx.x / LANES;
        there = c < scan.values;
        columns = min(COLUMNS, scan.values - part * COLUMNS);
        each = waves.keys / LANES;
        i64 in_all = waves.stretches + waves.positions;
        states = waves.pair(scan.values, place) + part * COLUMNS * in_all * waves.keys;
    }

    // Where element i of a lane is in state `index`: all lanes' side by side.
    __device__ __forceinline__ float *element(i64 index, int i) const {
        return states + (index * each + i) * LANES * columns + threadIdx.x;
    }

    template <int N> __device__ __forceinline__ void read(i64 index, float state[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++) state[i] = there && i < each ? *element(index, i) : 0.0f;
    }

    template <int N> __device__ __forceinline__ void write(i64 index, const float state[N]) const {
#pragma unroll
        for (int i = 0; i < N; i++)
            if (there && i < each) *element(index, i) = state[i];
    }
};

template <int KEYS> __device__ __forceinline__ void scan_begin(const Scan &scan, const Waves &waves) {
    const int N = KEYS / LANES;
    __shared__ Chunk<KEYS> chunk;
    for (i64 item = blockIdx.x; item < (i64)waves.pairs * waves.parts; item += gridDim.x) {
        Part part(scan, waves, item);
        float state[N] = {}, k[N];
        // The gradient of what comes after the last position.
        part.write<N>(0, state);
        for (int stretch = 0; stretch + 1 < waves.stretches; stretch++) {
            for (int first = 0; first < waves.positions; first += CHUNK) {
                int count = min(waves.positions - first, CHUNK);
                i64 row = part.start + (i64)stretch * waves.positions + first;
                __syncthreads();
                load_chunk(scan, chunk, row, count, part.h);
                __syncthreads();
                for (int p = 0; p < count; p++) {
                    float v = part.there ? load(scan.qkv, scan.dtype, scan.v(row + p, part.h) + part.c) : 0.0f;
                    lane_part<N>(chunk.k[p], part.lane, k);
                    advance<N>(state, k, v, chunk.factor[p], chunk.beta[p]);
                }
            }
            part.write<N>(stretch + 1, state);
        }
    }
}

// Adds vectors of the eight columns of a warp: of N elements a lane has, it keeps N/8 sums, those from (lane of the warp / 4)·N/8 on.
template <int N> __device__ __forceinline__ void share_out(float x[N]) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = N / 2, far = 16; far >= LANES; half /= 2, far /= 2) {
        bool upper = lane & far;
#pragma unroll
        for (int i = 0; i < half; i++) {
            float given = upper ? x[i] : x[i + half], kept = upper ? x[i + half] : x[i];
            x[i] = kept + __shfl_xor_sync(ALL_LANES, given, far);
        }
    }
}

// What the warps of a block have found of a position.
template <int KEYS> struct Found {
    float q[SCAN_WARPS][KEYS], k[SCAN_WARPS][KEYS];
    float decay[SCAN_WARPS], beta[SCAN_WARPS], out_delta[SCAN_WARPS];
};

template <int KEYS>
__device__ __forceinline__ void scan_back(const Scan &scan, const Waves &waves, int stretch, const void *dout, int dout_dtype, void *dqkv,
                                          int dqkv_dtype) {
    const int N = KEYS / LANES;
    __shared__ Chunk<KEYS> chunk;
    __shared__ Found<KEYS> found;
    int warp = threadIdx.x / 32, lane_of_warp = threadIdx.x % 32;
    i64 stretch_start = (i64)stretch * waves.positions;
    int count_of_all = (int)min((i64)waves.positions, scan.length - stretch_start);
    int chunks = (count_of_all + CHUNK - 1) / CHUNK;
    for (i64 item = blockIdx.x; item < (i64)waves.pairs * waves.parts; item += gridDim.x) {
        Part part(scan, waves, item);
        i64 start = part.start + stretch_start;
        float state[N] = {}, k[N];
        if (stretch > 0) part.read<N>(stretch, state);
        for (int first = 0; first < count_of_all; first += CHUNK) {
            int count = min(count_of_all - first, CHUNK);
            __syncthreads();
            load_chunk(scan, chunk, start + first, count, part.h);
            __syncthreads();
            for (int p = 0; p < count; p++) {
                part.write<N>(waves.stretches + first + p, state);
                float v = part.there ? load(scan.qkv, scan.dtype, scan.v(start + first + p, part.h) + part.c) : 0.0f;
                lane_part<N>(chunk.k[p], part.lane, k);
                advance<N>(state, k, v, chunk.factor[p], chunk.beta[p]);
            }
        }
        float gradient[N];
        part.read<N>(0, gradient);
        for (int turn = chunks - 1; turn >= 0; turn--) {
            int first = turn * CHUNK, count = min(count_of_all - first, CHUNK);
            __syncthreads();
            load_chunk(scan, chunk, start + first, count, part.h);
            __syncthreads();
            for (int p = count - 1; p >= 0; p--) {
                i64 row = start + first + p;
                float v = 0.0f, of_out = 0.0f, held = 0.0f, ddelta = 0.0f, of_states = 0.0f, q[N];
                if (part.there) {
                    v = load(scan.qkv, scan.dtype, scan.v(row, part.h) + part.c);
                    of_out = load(dout, dout_dtype, scan.out(row, part.h) + part.c);
                }
                float factor = chunk.factor[p], beta = chunk.beta[p];
                part.read<N>(waves.stretches + first + p, state);
                lane_part<N>(chunk.k[p], part.lane, k);
                lane_part<N>(chunk.q[p], part.lane, q);
#pragma unroll
                for (int i = 0; i < N; i++) held = fmaf(state[i], k[i], held), ddelta = fmaf(gradient[i], k[i], ddelta);
                float error = v - factor * column_sum(held), delta = beta * error;
                ddelta = column_sum(ddelta) + chunk.query_key[p] * of_out;
                float dv = beta * ddelta;
                if (part.there && part.lane == 0) store(dqkv, dqkv_dtype, scan.v(row, part.h) + part.c, dv);
                // From here on q and k are what a column adds to the gradients of the normalized ones.
#pragma unroll
                for (int i = 0; i < N; i++) {
                    float before = state[i], after = gradient[i], query = q[i], key = k[i];
                    q[i] = factor * before * of_out;
                    k[i] = fmaf(after, delta, -factor * before * dv);
                    after = fmaf(query, of_out, fmaf(key, -dv, after));
                    of_states = fmaf(before, after, of_states);
                    gradient[i] = factor * after;
                }
                share_out<N>(q);
                share_out<N>(k);
#pragma unroll
                for (int i = 0; i < N / 8; i++) {
                    int at = row_of(lane_of_warp / LANES * (N / 8) + i, part.lane);
                    found.q[warp][at] = q[i], found.k[warp][at] = k[i];
                }
                // All lanes of a column have its δ, one may count.
                float decay = warp_sum(factor * of_states), of_beta = warp_sum(part.lane == 0 ? ddelta * error : 0.0f);
                float out_delta = warp_sum(part.lane == 0 ? of_out * delta : 0.0f);
                if (lane_of_warp == 0) found.decay[warp] = decay, found.beta[warp] = of_beta, found.out_delta[warp] = out_delta;
                __syncthreads();
                float *sums = waves.sums(scan.values, part.place, part.part, stretch_start + first + p);
                float both = 0.0f;
                for (int w = 0; w < SCAN_WARPS; w++) both += found.out_delta[w];
                for (int at = threadIdx.x; at < waves.keys; at += SCAN_THREADS) {
                    float of_q = chunk.k[p][at] * both, of_k = chunk.q[p][at] * both;
                    for (int w = 0; w < SCAN_WARPS; w++) of_q += found.q[w][at], of_k += found.k[w][at];
                    sums[at] = of_q, sums[waves.keys + at] = of_k;
                }
                if (threadIdx.x == 0) {
                    float of_decay = 0.0f, of_betas = 0.0f;
                    for (int w = 0; w < SCAN_WARPS; w++) of_decay += found.decay[w], of_betas += found.beta[w];
                    sums[2 * waves.keys] = of_decay, sums[2 * waves.keys + 1] = of_betas;
                }
                __syncthreads();
            }
        }
        part.write<N>(0, gradient);
    }
}

// A warp takes a key head of the wave at a position of the stretch.
extern "C" __global__ void __launch_bounds__(256)
delta_finish(const void *qkv, int dtype, i64 sequences, i64 length, int key_heads, int heads, int keys, int values, float *scratch,
             i64 first, int pairs, int positions, int stretches, int parts, int padded_keys, int stretch, void *dqkv, int dqkv_dtype,
             float *ddecay, float *dbeta) {
    // K is 256 at most.
    const int EACH = 8;
    Scan scan = {qkv, dtype, nullptr, nullptr, sequences, length, key_heads, heads, keys, values};
    Waves waves = {scratch, first, pairs, positions, stretches, parts, padded_keys};
    int lane = threadIdx.x % 32, group = heads / key_heads;
    i64 stretch_start = (i64)stretch * positions, count = min((i64)positions, length - stretch_start);
    i64 warp = (i64)blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, warps = (i64)gridDim.x * (blockDim.x / 32);
    for (i64 item = warp; item < pairs / group * count; item += warps) {
        int index = (int)(item / count);
        i64 position = stretch_start + item % count, pair = first + (i64)index * group;
        i64 row = pair / heads * length + position;
        int h = (int)(pair % heads), g = scan.key_head(h);
        float sums[2][EACH] = {};
        for (int head = 0; head < group; head++) {
            float decay = 0.0f, beta = 0.0f;
            for (int part = 0; part < parts; part++) {
                const float *found = waves.sums(values, index * group + head, part, position);
#pragma unroll
                for (int i = 0; i < EACH; i++) {
                    int at = lane + 32 * i;
                    if (at < keys) sums[0][i] += found[at], sums[1][i] += found[padded_keys + at];
                }
                decay += found[2 * padded_keys], beta += found[2 * padded_keys + 1];
            }
            if (lane == 0) ddecay[scan.gate(row, h + head)] = decay, dbeta[scan.gate(row, h + head)] = beta;
        }
#pragma unroll
        for (int which = 0; which < 2; which++) {
            i64 at = which == 0 ? scan.q(row, g) : scan.k(row, g);
            float x[EACH], inner = 0.0f;
#pragma unroll
            for (int i = 0; i < EACH; i++) x[i] = lane + 32 * i < keys ? load(qkv, dtype, at + lane + 32 * i) : 0.0f;
            float reciprocal = reciprocal_norm<EACH>(x);
            float scale = which == 0 ? reciprocal / sqrtf((float)keys) : reciprocal;
#pragma unroll
            for (int i = 0; i < EACH; i++) x[i] *= reciprocal, inner = fmaf(x[i], sums[which][i], inner);
            inner = warp_sum(inner);
#pragma unroll
            for (int i = 0; i < EACH; i++)
                if (lane + 32 * i < keys) store(dqkv, dqkv_dtype, at + lane + 32 * i, scale * fmaf(x[i], -inner, sums[which][i]));
        }
    }
}

#define SCAN_PARAMETERS \
    const void *qkv, int dtype, const float *decay, const float *beta, i64 sequences, i64 length, int key_heads, int heads, int keys, int values
#define SCAN {qkv, dtype, decay, beta, sequences, length, key_heads, heads, keys, values}
#define WAVE_PARAMETERS float *scratch, i64 first, int pairs, int positions, int stretches, int parts, int padded_keys
#define WAVE {scratch, first, pairs, positions, stretches, parts, padded_keys}

extern "C" __global__ void __launch_bounds__(128)
delta_scan_64(SCAN_PARAMETERS, float *states, const int *slots, const int *starts, const int *last, void *out, int out_dtype) {
    scan_forward<64>(SCAN, states, slots, starts, last, out, out_dtype);
}

extern "C" __global__ void __launch_bounds__(128)
delta_scan_128(SCAN_PARAMETERS, float *states, const int *slots, const int *starts, const int *last, void *out, int out_dtype) {
    scan_forward<128>(SCAN, states, slots, starts, last, out, out_dtype);
}

extern "C" __global__ void __launch_bounds__(128)
delta_scan_256(SCAN_PARAMETERS, float *states, const int *slots, const int *starts, const int *last, void *out, int out_dtype) {
    scan_forward<256>(SCAN, states, slots, starts, last, out, out_dtype);
}

extern "C" __global__ void __launch_bounds__(128) delta_begin_64(SCAN_PARAMETERS, WAVE_PARAMETERS) { scan_begin<64>(SCAN, WAVE); }
extern "C" __global__ void __launch_bounds__(128) delta_begin_128(SCAN_PARAMETERS, WAVE_PARAMETERS) { scan_begin<128>(SCAN, WAVE); }
extern "C" __global__ void __launch_bounds__(128) delta_begin_256(SCAN_PARAMETERS, WAVE_PARAMETERS) { scan_begin<256>(SCAN, WAVE); }

extern "C" __global__ void __launch_bounds__(128)
delta_back_64(SCAN_PARAMETERS, WAVE_PARAMETERS, int stretch, const void *dout, int dout_dtype, void *dqkv, int dqkv_dtype) {
    scan_back<64>(SCAN, WAVE, stretch, dout, dout_dtype, dqkv, dqkv_dtype);
}

extern "C" __global__ void __launch_bounds__(128)
delta_back_128(SCAN_PARAMETERS, WAVE_PARAMETERS, int stretch, const void *dout, int dout_dtype, void *dqkv, int dqkv_dtype) {
    scan_back<128>(SCAN, WAVE, stretch, dout, dout_dtype, dqkv, dqkv_dtype);
}

extern "C" __global__ void __launch_bounds__(128)
delta_back_256(SCAN_PARAMETERS, WAVE_PARAMETERS, int stretch, const void *dout, int dout_dtype, void *dqkv, int dqkv_dtype) {
    scan_back<256>(SCAN, WAVE, stretch, dout, dout_dtype, dqkv, dqkv_dtype);
}
