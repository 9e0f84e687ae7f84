// Attention of few queries on many keys, as in decoding, with the keys shared out among blocks: Dao, Haziza, Massa and
// Sizov, "Flash-Decoding for long-context inference" (2023). The operation, its symbols and the order of rows are those of
// attention.cu.
//
//   attention_decode_{4,8}    partials of pieces of the keys    4·K FLOPs a visible pair; `_capped` as in attention.cu
//   attention_decode_merge    out, lse from the partials        2·K a row and piece
//   attention_append          new keys and values to pages      no FLOPs; both once
//
// One query of a sequence gives attention.cu a block for each key head, which is a fraction of a card, and walks all keys
// one tile after the other. Here a block takes `piece` keys of a (sequence, key head) for 4 or 8 rows (the suffix), and leaves
// for each row the sum of its weighted values, unscaled, the largest score and the sum of exponentials:
//
//   partials f32 [B·H·S, pieces, K + 2], rows in the order of q's
//
// The length of the keys is on the card alone, so that the grid is made for the capacity: what lies behind the last visible
// key, or before the first, leaves an empty partial (−∞, 0). Head sizes are multiples of 8 up to 256.
//
// A tile of 64 keys: two threads a key compute the scores of all rows, loading 16 bytes in turn; a warp a row then takes the
// softmax; for the values a thread has eight columns and every `lanes`-th key. So keys and values are loaded once, in
// sectors of 32 bytes or more, and never stored in shared memory.
//
// Bytes from memory: keys and values once for up to 8 rows that share them, which is nearly all there is; partials, 4·(K + 2)
// a row and piece, once each way.
//
// Order of sums: eight columns of a score at a time, even eights apart from odd ones; values by lane of keys, ascending, then
// lanes, then pieces ascending. No atomics. f32 throughout. Of values, those that no row sees are not read.
//
// Compiled for sm_80 to sm_120; run emulated and on an H200 (sm_90).

#define DECODE_THREADS 128
#define DECODE_TILE 64
#define HEAD_MAX 256
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

struct Shape {
    int queries, capacity, heads, kv_heads, head_size;
    // See `first_key`.
    int sight;
    float scale, cap;
    // Keys that a block takes, a multiple of the tile.
    int piece;
    // Of all sequences one after the other.
    Pages pages;
};

// Shared memory of a block.
template <int ROWS> struct Shared {
    // In the end a row's values by lane of keys: eight of each thread.
    float queries[ROWS * HEAD_MAX];
    static_assert(ROWS * HEAD_MAX >= DECODE_THREADS * 8, "the sums of a row fit");
    float weights[ROWS][DECODE_TILE];
    float most[ROWS], total[ROWS], keep[ROWS];
};

// The place of row r of a (sequence, key head) among those of q.
__device__ __forceinline__ i64 row_place(const Shape &shape, int b, int kv_head, int r) {
    int group = shape.heads / shape.kv_heads;
    return ((i64)b * shape.queries + r / group) * shape.heads + kv_head * group + r % group;
}

// Grid: (pieces of the keys, B·G, pieces of ROWS rows).
template <int ROWS, bool CAPPED>
__device__ __forceinline__ void decode(const void *q, int q_dtype, const void *k, int k_dtype, const void *v, int v_dtype,
                                       const int *starts, float *partials, const Shape &shape) {
    __shared__ Shared<ROWS> shared;
    int t = threadIdx.x, head = shape.head_size;
    int b = blockIdx.y / shape.kv_heads, kv_head = blockIdx.y % shape.kv_heads, group = shape.heads / shape.kv_heads;
    int row = blockIdx.z * ROWS, rows = min(ROWS, shape.queries * group - row);
    int start = starts[b];
    int last = start + (row + rows - 1) / group, first = first_key(start + row / group, shape.sight);
    int begin = max((int)blockIdx.x * shape.piece, max(first, 0) / DECODE_TILE * DECODE_TILE);
    int end = min(min(((int)blockIdx.x + 1) * shape.piece, shape.capacity), last + 1);

    for (int i = t; i < ROWS * head; i += DECODE_THREADS) {
        int r = i / head;
        i64 at = row_place(shape, b, kv_head, row + min(r, rows - 1)) * head + i % head;
        shared.queries[i] = r < rows ? load(q, q_dtype, at) * shape.scale : 0.0f;
    }
    if (t < ROWS) shared.most[t] = MINUS_INFINITY, shared.total[t] = 0.0f;

    i64 step = (i64)shape.kv_heads * head;
    int eights = head / 8, lanes = DECODE_THREADS / eights, column = t % eights * 8, lane = t / eights;
    float sums[ROWS][8] = {};
    for (int tile = begin; tile < end; tile += DECODE_TILE) {
        // Also before the first tile: the queries.
        __syncthreads();
        int key = tile + t / 2;
        i64 origin = (shape.pages.rows_before(b, shape.capacity, tile) + tile) * step + (i64)kv_head * head;
        bool there = shape.pages.there(b, shape.capacity, tile);
        float scores[ROWS] = {};
        if (there && key < end) {
            for (int c = t % 2 * 8; c < head; c += 16) {
                float x[8];
                load8(k, k_dtype, origin + t / 2 * step + c, x);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < 8; j++) scores[r] += shared.queries[r * head + c + j] * x[j];
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score = scores[r] + __shfl_xor_sync(ALL_LANES, scores[r], 1);
            if (CAPPED) score = shape.cap * tanhf(score / shape.cap);
            int position = start + (row + r) / group;
            bool visible = key < end && key <= position && key >= first_key(position, shape.sight);
            if (t % 2 == 0) shared.weights[r][t / 2] = visible ? score : MINUS_INFINITY;
        }
        __syncthreads();
        for (int r = t / 32; r < ROWS; r += DECODE_THREADS / 32) {
            float low = shared.weights[r][t % 32], high = shared.weights[r][t % 32 + 32];
            float before = shared.most[r], most = fmaxf(fmaxf(low, high), before);
#pragma unroll
            for (int apart = 16; apart > 0; apart /= 2) most = fmaxf(most, __shfl_xor_sync(ALL_LANES, most, apart));
            // A row that has seen no key yet: everything stays zero.
            float shift = most == MINUS_INFINITY ? 0.0f : most;
            low = expf(low - shift), high = expf(high - shift);
            float sum = warp_sum(low + high);
            shared.weights[r][t % 32] = low, shared.weights[r][t % 32 + 32] = high;
            // All lanes have read what the first one replaces.
            __syncwarp();
            if (t % 32 == 0) {
                float keep = expf(before - shift);
                shared.keep[r] = keep, shared.most[r] = most;
                shared.total[r] = shared.total[r] * keep + sum;
            }
        }
        __syncthreads();
#pragma unroll
        for (int r = 0; r < ROWS; r++)
#pragma unroll
            for (int j = 0; j < 8; j++) sums[r][j] *= shared.keep[r];
        if (there && lane < lanes) {
            for (int i = lane; i < DECODE_TILE && tile + i < end; i += lanes) {
                // No row sees it, so it may be anything.
                if (tile + i < first) continue;
                float x[8];
                load8(v, v_dtype, origin + i * step + column, x);
#pragma unroll
                for (int r = 0; r < ROWS; r++)
#pragma unroll
                    for (int j = 0; j < 8; j++) sums[r][j] += shared.weights[r][i] * x[j];
            }
        }
    }
    float *by_lane = shared.queries;
    for (int r = 0; r < rows; r++) {
        __syncthreads();
        if (lane < lanes) {
#pragma unroll
            for (int row_of_sums = 0; row_of_sums < ROWS; row_of_sums++)
                if (row_of_sums == r)
                    for (int j = 0; j < 8; j++) by_lane[lane * head + column + j] = sums[row_of_sums][j];
        }
        __syncthreads();
        float *partial = partials + (row_place(shape, b, kv_head, row + r) * gridDim.x + blockIdx.x) * (head + 2);
        for (int c = t; c < head; c += DECODE_THREADS) {
            float sum = 0.0f;
            for (int of = 0; of < lanes; of++) sum += by_lane[of * head + c];
            partial[c] = sum;
        }
        if (t == 0) partial[head] = shared.most[r], partial[head + 1] = shared.total[r];
    }
}

#define DECODE_PARAMETERS                                                                                              \
    const void *q, int q_dtype, const void *k, int k_dtype, const void *v, int v_dtype, const int *pages,              \
        int page_shift, const int *starts, float *partials, int queries, int capacity, int heads, int kv_heads,        \
        int head_size, int sight, float scale, float cap, int piece
#define DECODE(...)                                                                                                    \
    decode<__VA_ARGS__>(q, q_dtype, k, k_dtype, v, v_dtype, starts, partials,                                          \
                        {queries, capacity, heads, kv_heads, head_size, sight, scale, cap, piece, {pages, page_shift}})

extern "C" __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_4(DECODE_PARAMETERS) { DECODE(4, false); }
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_8(DECODE_PARAMETERS) { DECODE(8, false); }
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_4_capped(DECODE_PARAMETERS) { DECODE(4, true); }
extern "C" __global__ void __launch_bounds__(DECODE_THREADS) attention_decode_8_capped(DECODE_PARAMETERS) { DECODE(8, true); }

// Grid: rows of q, in their order.
extern "C" __global__ void __launch_bounds__(DECODE_THREADS)
attention_decode_merge(const float *partials, int pieces, void *out, int out_dtype, float *lse, int queries, int heads,
                       int head_size) {
    i64 row = blockIdx.x, width = head_size + 2;
    const float *from = partials + row * pieces * width;
    float most = MINUS_INFINITY, total = 0.0f;
    for (int piece = 0; piece < pieces; piece++) most = fmaxf(most, from[piece * width + head_size]);
    for (int piece = 0; piece < pieces; piece++) {
        const float *partial = from + piece * width + head_size;
        total += partial[1] * expf(partial[0] - most);
    }
    float inverse = 1.0f / total;
    for (int c = threadIdx.x; c < head_size; c += DECODE_THREADS) {
        float sum = 0.0f;
        for (int piece = 0; piece < pieces; piece++) {
            const float *partial = from + piece * width;
            sum += partial[c] * expf(partial[head_size] - most);
        }
        store(out, out_dtype, row * head_size + c, sum * inverse);
    }
    if (threadIdx.x == 0) {
        i64 head = row % heads, query = row / heads % queries, b = row / heads / queries;
        lse[(b * heads + head) * queries + query] = most + logf(total);
    }
}

// Rows of k and v [B, S, G·K] to positions starts[b] … of the sequences' pages; those without a page are left out.
// Grid: (B·S, keys or values, if there are any).
extern "C" __global__ void __launch_bounds__(DECODE_THREADS)
attention_append(const void *k, int k_dtype, const void *v, int v_dtype, const int *pages, int page_shift, const int *starts,
                 void *to_k, int to_k_dtype, void *to_v, int to_v_dtype, int length, int width, int per_sequence) {
    int b = blockIdx.x / length, position = starts[b] + blockIdx.x % length, page = position >> page_shift;
    if (page >= per_sequence || pages[(i64)b * per_sequence + page] < 0) return;
    const void *from = blockIdx.y == 0 ? k : v;
    void *to = blockIdx.y == 0 ? to_k : to_v;
    int from_dtype = blockIdx.y == 0 ? k_dtype : v_dtype, to_dtype = blockIdx.y == 0 ? to_k_dtype : to_v_dtype;
    i64 before = Pages{pages, page_shift}.rows_before(b, per_sequence << page_shift, position);
    i64 from_row = (i64)blockIdx.x * width, to_row = (before + position) * width;
    bool vector = aligned16(from) && aligned16(to) && width % 8 == 0;
    for (int c = threadIdx.x * 8; c < width; c += DECODE_THREADS * 8) {
        int count = min(width - c, 8);
        float x[8];
        load8_or_less(from, from_dtype, from_row + c, count, vector, x);
        store8_or_less(to, to_dtype, to_row + c, count, vector, x);
    }
}
