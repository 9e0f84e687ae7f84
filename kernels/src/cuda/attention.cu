// Causal attention with grouped keys and values, without an S×S matrix in memory: Dao, arXiv 2307.08691.
//
// q, out, dout, dq [B, S, H, K]; k, v, dk, dv [B, C, G, K]; lse f32 [B, H, S]; H is a multiple of G. Query i of sequence b
// is at position p = starts[b] + i and sees keys first_key(p) ≤ j ≤ p.
//
//   s_j = scale·q·k_j,  lse = ln Σ exp(s_j),  p_j = exp(s_j − lse),  out = Σ p_j·v_j
//   D = Σ dout·out,  ds_j = p_j·(dout·v_j − D)·scale,  dq = Σ ds_j·k_j,  dk_j = Σ ds_j·q,  dv_j = Σ p_j·dout
//
//   attention_forward_{64,128,256}    out, lse        4·K FLOPs a visible pair
//   attention_dq_{64,128}             dq              6·K, and 2·K again for every further 128 columns
//   attention_dkv_{64,128}            dk, dv          8·K, and 4·K again for every further 128 columns
//
// `_capped` (of the largest suffix only: models that cap their scores have large heads): t_j = tanh(scale·q·k_j / cap),
// s_j = cap·t_j, and ds_j is multiplied by 1 − t_j². They are kernels of their own, so that those without a cap keep their
// registers, and take the same parameters.
//
// Rows. All queries that share keys are rows of one matrix: row r of a (sequence, key head) is query r / (H/G) of head
// (key head)·H/G + r % (H/G). Decoding thus fills a tile with the heads of a group. A tile has 64 rows and 64 keys and
// belongs to a block of 256 threads (16 × 16, four rows and four keys each; see `tile_product`). The dkv pass is the same
// with the roles of rows and keys exchanged.
//
// Columns. The suffix is the number of columns of the result that a block keeps in registers (blockIdx.z counts pieces of
// that many for larger heads, which compute the scores again). Operands pass through shared memory in pieces of 32
// columns, so that the head size is not limited by it.
//
// Order of sums: columns of a score ascending; tiles of keys (dkv: of rows) ascending, within one ascending too. No
// atomics: each result has one writer. f32 throughout. Nothing beyond the last visible key is read, so that what is not
// there yet may be NaN. Within a tile zeros hide: a value that is not finite reaches rows that do not see it.
//
// Bytes from memory: operands and results once; from the L2 cache, keys and values once per 64 rows, and so on.
// This is the plain version, without tensor cores.

// Columns of an operand in shared memory at a time.
#define PIECE 32
// Floats of shared memory: two operands' pieces, and the 64 × 64 numbers between the two products of a tile.
#define SHARED_FLOATS (2 * PIECE * TILE_STRIDE + TILE * TILE_STRIDE)

struct Shape {
    int queries, capacity, heads, kv_heads, head_size;
    // See `first_key`.
    int sight;
    float scale, cap;
    // Of all sequences one after the other.
    Pages pages;
};

// A score from q·k; a cap makes its derivative by that, `slope`, another than the scale.
template <bool CAPPED> __device__ __forceinline__ float score_of(float product, const Shape &shape, float &slope) {
    if (!CAPPED) return product * shape.scale;
    float t = tanhf(product * shape.scale / shape.cap);
    slope = shape.scale * (1.0f - t * t);
    return shape.cap * t;
}

// A matrix of which a tile has 64 rows: row r is at origin + r / group · step + r % group · head_size. Of keys in pages the
// origin is that of one tile.
struct Rows {
    const void *from;
    int dtype;
    bool vector;
    i64 origin, step;
    int group, head_size, end;
};

__device__ __forceinline__ i64 row_offset(const Rows &rows, int r) {
    return rows.origin + (i64)(r / rows.group) * rows.step + (i64)(r % rows.group) * rows.head_size;
}

__device__ __forceinline__ Rows query_rows(const void *from, int dtype, const Shape &shape, int b, int kv_head) {
    int group = shape.heads / shape.kv_heads;
    i64 step = (i64)shape.heads * shape.head_size;
    i64 origin = (i64)b * shape.queries * step + (i64)kv_head * group * shape.head_size;
    bool vector = aligned16(from) && shape.head_size % 8 == 0;
    return {from, dtype, vector, origin, step, group, shape.head_size, shape.queries * group};
}

// `end`: keys that may be read.
__device__ __forceinline__ Rows key_rows(const void *from, int dtype, const Shape &shape, int b, int kv_head, int end) {
    i64 step = (i64)shape.kv_heads * shape.head_size;
    i64 origin = (i64)b * shape.capacity * step + (i64)kv_head * shape.head_size;
    bool vector = aligned16(from) && shape.head_size % 8 == 0;
    return {from, dtype, vector, origin, step, 1, shape.head_size, end};
}

// to[column][row] of 64 rows from `row` on and 32 columns; zeros beyond the ends.
__device__ __forceinline__ void load_piece(float *to, const Rows &rows, int row, int column) {
    int r = threadIdx.x / 4, d = threadIdx.x % 4 * 8;
    int count = row + r < rows.end ? min(max(rows.head_size - column - d, 0), 8) : 0;
    float x[8];
    load8_or_less(rows.from, rows.dtype, count > 0 ? row_offset(rows, row + r) + column + d : 0, count, rows.vector, x);
#pragma unroll
    for (int j = 0; j < 8; j++) to[(d + j) * TILE_STRIDE + r] = x[j];
}

// to[row][column] of 64 rows and 64 columns.
__device__ __forceinline__ void load_square(float *to, const Rows &rows, int row, int column) {
    int r = threadIdx.x / 4, d = threadIdx.x % 4 * 16;
    i64 at = row + r < rows.end ? row_offset(rows, row + r) + column : 0;
#pragma unroll
    for (int half = 0; half < 16; half += 8) {
        int count = row + r < rows.end ? min(max(rows.head_size - column - d - half, 0), 8) : 0;
        float x[8];
        load8_or_less(rows.from, rows.dtype, at + d + half, count, rows.vector, x);
#pragma unroll
        for (int j = 0; j < 8; j++) to[r * TILE_STRIDE + d + half + j] = x[j];
    }
}

// products[i][j] = row (a_row + 4y + i) of a times row (b_row + 4x + j) of b. Begins and ends with a barrier.
__device__ __forceinline__ void row_products(float products[4][4], const Rows &a, int a_row, const Rows &b, int b_row,
                                             float *pieces) {
    float *a_piece = pieces, *b_piece = pieces + PIECE * TILE_STRIDE;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) products[i][j] = 0.0f;
    for (int column = 0; column < a.head_size; column += PIECE) {
        __syncthreads();
        load_piece(a_piece, a, a_row, column);
        load_piece(b_piece, b, b_row, column);
        __syncthreads();
        tile_product(products, a_piece, b_piece, PIECE);
    }
    __syncthreads();
}

// sums[piece][i][j] += Σ_b weights[b][4y + i] · rows[b][first + 64·piece + 4x + j]. Begins and ends with a barrier.
template <int SQUARES>
__device__ __forceinline__ void add_weighted(float sums[SQUARES][4][4], const float *weights, const Rows &rows, int row,
                                             int first, float *pieces) {
#pragma unroll
    for (int square = 0; square < SQUARES; square++) {
        int column = first + square * TILE;
        if (column >= rows.head_size) continue;
        __syncthreads();
        load_square(pieces, rows, row, column);
        __syncthreads();
        tile_product(sums[square], weights, pieces, TILE);
    }
    __syncthreads();
}

// weights[4x + j][4y + i] = values[i][j]: the first index is the one that is summed over next. The barriers that
// `row_products` and `add_weighted` begin and end with stand before and after.
__device__ __forceinline__ void put_weights(float *weights, const float values[4][4]) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int j = 0; j < 4; j++)
        *(float4 *)(weights + (4 * x + j) * TILE_STRIDE + 4 * y) =
            make_float4(values[0][j], values[1][j], values[2][j], values[3][j]);
}

template <int SQUARES>
__device__ __forceinline__ void store_tile(void *to, int dtype, const Rows &rows, int row, int first,
                                           const float sums[SQUARES][4][4], const float factor[4]) {
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = row + 4 * y + i;
        if (r >= rows.end) continue;
        i64 at = row_offset(rows, r);
#pragma unroll
        for (int square = 0; square < SQUARES; square++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int column = first + square * TILE + 4 * x + j;
                if (column < rows.head_size) store(to, dtype, at + column, sums[square][i][j] * factor[i]);
            }
    }
}

// Over the sixteen threads of a row of threads.
__device__ __forceinline__ float half_warp_sum(float x) {
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

__device__ __forceinline__ float half_warp_max(float x) {
#pragma unroll
    for (int lanes = 8; lanes > 0; lanes /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    return x;
}

#define MINUS_INFINITY __uint_as_float(0xFF800000u)

// Grid: (blocks of 64 rows, B·G, pieces of 64·SQUARES columns).
template <int SQUARES, bool CAPPED>
__device__ __forceinline__ void forward(const void *q, int q_dtype, const void *k, int k_dtype, const void *v, int v_dtype,
                                        const int *starts, void *out, int out_dtype, float *lse, const Shape &shape) {
    float *pieces = (float *)dynamic_shared, *weights = pieces + 2 * PIECE * TILE_STRIDE;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    int b = blockIdx.y / shape.kv_heads, kv_head = blockIdx.y % shape.kv_heads, group = shape.heads / shape.kv_heads;
    // The longest rows of keys are begun first.
    int row = (int)(gridDim.x - 1 - blockIdx.x) * TILE, first = blockIdx.z * SQUARES * TILE;
    Rows q_rows = query_rows(q, q_dtype, shape, b, kv_head);
    int start = starts[b];
    int last_position = start + min(row + TILE - 1, q_rows.end - 1) / group;
    int key_end = min(last_position + 1, shape.capacity);
    Rows k_rows = key_rows(k, k_dtype, shape, b, kv_head, key_end), v_rows = k_rows;
    v_rows.from = v, v_rows.dtype = v_dtype, v_rows.vector = aligned16(v) && shape.head_size % 8 == 0;

    int positions[4];
    float most[4], total[4], sums[SQUARES][4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        positions[i] = start + (row + 4 * y + i) / group;
        most[i] = MINUS_INFINITY, total[i] = 0.0f;
    }
    int key_first = max(first_key(start + row / group, shape.sight), 0) / TILE * TILE;
    for (int key = key_first; key < key_end; key += TILE) {
        float scores[4][4];
        k_rows.origin = shape.pages.rows_before(b, shape.capacity, key) * k_rows.step + (i64)kv_head * shape.head_size;
        k_rows.end = v_rows.end = shape.pages.there(b, shape.capacity, key) ? key_end : 0;
        row_products(scores, q_rows, row, k_rows, key, pieces);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float highest = most[i];
            int lowest_key = first_key(positions[i], shape.sight);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = key + 4 * x + j;
                bool visible = at <= positions[i] && at >= lowest_key;
                float slope;
                scores[i][j] = visible ? score_of<CAPPED>(scores[i][j], shape, slope) : MINUS_INFINITY;
                highest = fmaxf(highest, scores[i][j]);
            }
            highest = half_warp_max(highest);
            // A row that has seen no key yet: everything stays zero.
            float shift = highest == MINUS_INFINITY ? 0.0f : highest, sum = 0.0f;
            float keep = expf(most[i] - shift);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][j] = expf(scores[i][j] - shift);
                sum += scores[i][j];
            }
            total[i] = total[i] * keep + half_warp_sum(sum);
            most[i] = highest;
#pragma unroll
            for (int square = 0; square < SQUARES; square++)
#pragma unroll
                for (int j = 0; j < 4; j++) sums[square][i][j] *= keep;
        }
        put_weights(weights, scores);
        v_rows.origin = k_rows.origin;
        add_weighted<SQUARES>(sums, weights, v_rows, key, first, pieces);
    }
    float inverse[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        inverse[i] = 1.0f / total[i];
        int r = row + 4 * y + i;
        if (x == 0 && first == 0 && r < q_rows.end) {
            i64 head = (i64)b * shape.heads + kv_head * group + r % group;
            lse[head * shape.queries + r / group] = most[i] + logf(total[i]);
        }
    }
    store_tile<SQUARES>(out, out_dtype, q_rows, row, first, sums, inverse);
}

// What the backward passes know of four rows: their log-sum-exp and D.
struct Deltas {
    float lse[4], delta[4];
};

__device__ __forceinline__ float row_lse(const float *lse, const Shape &shape, int b, int kv_head, int r) {
    int group = shape.heads / shape.kv_heads;
    i64 head = (i64)b * shape.heads + kv_head * group + r % group;
    return lse[head * shape.queries + r / group];
}

// D of one row, by the sixteen threads of a row of threads; all of the warp must call it.
__device__ __forceinline__ float row_delta(const Rows &out, const Rows &dout, int r, int x) {
    float sum = 0.0f;
    if (r < out.end) {
        i64 at = row_offset(out, r);
        for (int c = x; c < out.head_size; c += 16) sum += load(out.from, out.dtype, at + c) * load(dout.from, dout.dtype, at + c);
    }
    return half_warp_sum(sum);
}

// Grid: (blocks of 64 rows, B·G, pieces of 64·SQUARES columns). C = S and all starts are 0.
template <int SQUARES, bool CAPPED>
__device__ __forceinline__ void backward_dq(const void *q, int q_dtype, const void *k, int k_dtype, const void *v,
                                            int v_dtype, const void *out, int out_dtype, const float *lse,
                                            const void *dout, int dout_dtype, void *dq, int dq_dtype, const Shape &shape) {
    float *pieces = (float *)dynamic_shared, *weights = pieces + 2 * PIECE * TILE_STRIDE;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    int b = blockIdx.y / shape.kv_heads, kv_head = blockIdx.y % shape.kv_heads, group = shape.heads / shape.kv_heads;
    int row = (int)(gridDim.x - 1 - blockIdx.x) * TILE, first = blockIdx.z * SQUARES * TILE;
    Rows q_rows = query_rows(q, q_dtype, shape, b, kv_head), out_rows = query_rows(out, out_dtype, shape, b, kv_head);
    Rows dout_rows = query_rows(dout, dout_dtype, shape, b, kv_head);
    int key_end = min(row + TILE - 1, q_rows.end - 1) / group + 1;
    Rows k_rows = key_rows(k, k_dtype, shape, b, kv_head, key_end), v_rows = key_rows(v, v_dtype, shape, b, kv_head, key_end);

    float row_lses[4], deltas[4], sums[SQUARES][4][4] = {};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int r = row + 4 * y + i;
        deltas[i] = row_delta(out_rows, dout_rows, r, x);
        row_lses[i] = r < q_rows.end ? row_lse(lse, shape, b, kv_head, r) : 0.0f;
    }
    int key_first = max(first_key(row / group, shape.sight), 0) / TILE * TILE;
    for (int key = key_first; key < key_end; key += TILE) {
        float scores[4][4], gradients[4][4];
        row_products(scores, q_rows, row, k_rows, key, pieces);
        row_products(gradients, dout_rows, row, v_rows, key, pieces);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int r = row + 4 * y + i, position = r / group, lowest_key = first_key(position, shape.sight);
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int at = key + 4 * x + j;
                bool visible = r < q_rows.end && at <= position && at >= lowest_key;
                float slope = shape.scale;
                float p = visible ? expf(score_of<CAPPED>(scores[i][j], shape, slope) - row_lses[i]) : 0.0f;
                scores[i][j] = visible ? p * (gradients[i][j] - deltas[i]) * slope : 0.0f;
            }
        }
        put_weights(weights, scores);
        add_weighted<SQUARES>(sums, weights, k_rows, key, first, pieces);
    }
    float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    store_tile<SQUARES>(dq, dq_dtype, q_rows, row, first, sums, one);
}

// Grid: (blocks of 64 keys, B·G, pieces of 64·SQUARES columns). Thread (y, x) has keys 4y + i and rows 4x + j.
template <int SQUARES, bool CAPPED>
__device__ __forceinline__ void backward_dkv(const void *q, int q_dtype, const void *k, int k_dtype, const void *v,
                                             int v_dtype, const void *out, int out_dtype, const float *lse,
                                             const void *dout, int dout_dtype, void *dk, int dk_dtype, void *dv,
                                             int dv_dtype, const Shape &shape) {
    float *pieces = (float *)dynamic_shared, *weights = pieces + 2 * PIECE * TILE_STRIDE;
    float *tile_deltas = weights + TILE * TILE_STRIDE, *tile_lses = tile_deltas + TILE;
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
    int b = blockIdx.y / shape.kv_heads, kv_head = blockIdx.y % shape.kv_heads, group = shape.heads / shape.kv_heads;
    int key = blockIdx.x * TILE, first = blockIdx.z * SQUARES * TILE;
    Rows q_rows = query_rows(q, q_dtype, shape, b, kv_head), out_rows = query_rows(out, out_dtype, shape, b, kv_head);
    Rows dout_rows = query_rows(dout, dout_dtype, shape, b, kv_head);
    Rows k_rows = key_rows(k, k_dtype, shape, b, kv_head, shape.capacity);
    Rows v_rows = key_rows(v, v_dtype, shape, b, kv_head, shape.capacity);

    float of_k[SQUARES][4][4] = {}, of_v[SQUARES][4][4] = {};
    // Rows that see one of these keys: from the first key's own query to the last one that sees the last key.
    int query_last = (int)min(last_query(key + TILE - 1, shape.sight), (i64)shape.queries - 1);
    int row_end = (query_last + 1) * group;
    for (int row = key * group / TILE * TILE; row < row_end; row += TILE) {
        for (int i = 0; i < 4; i++) {
            int r = row + 4 * y + i;
            float delta = row_delta(out_rows, dout_rows, r, x);
            if (x == 0) {
                tile_deltas[4 * y + i] = delta;
                tile_lses[4 * y + i] = r < q_rows.end ? row_lse(lse, shape, b, kv_head, r) : 0.0f;
            }
        }
        float scores[4][4], gradients[4][4];
        // Their barriers make the deltas visible, too.
        row_products(scores, k_rows, key, q_rows, row, pieces);
        row_products(gradients, v_rows, key, dout_rows, row, pieces);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                int r = row + 4 * x + j;
                int at = key + 4 * y + i, position = r / group;
                bool visible = r < q_rows.end && at <= position && at >= first_key(position, shape.sight);
                float slope = shape.scale;
                float p = visible ? expf(score_of<CAPPED>(scores[i][j], shape, slope) - tile_lses[4 * x + j]) : 0.0f;
                scores[i][j] = p;
                gradients[i][j] = visible ? p * (gradients[i][j] - tile_deltas[4 * x + j]) * slope : 0.0f;
            }
        put_weights(weights, scores);
        add_weighted<SQUARES>(of_v, weights, dout_rows, row, first, pieces);
        put_weights(weights, gradients);
        add_weighted<SQUARES>(of_k, weights, q_rows, row, first, pieces);
    }
    float one[4] = {1.0f, 1.0f, 1.0f, 1.0f};
    store_tile<SQUARES>(dk, dk_dtype, k_rows, key, first, of_k, one);
    store_tile<SQUARES>(dv, dv_dtype, v_rows, key, first, of_v, one);
}

#define FORWARD_PARAMETERS                                                                                             \
    const void *q, int q_dtype, const void *k, int k_dtype, const void *v, int v_dtype, const int *pages,              \
        int page_shift, const int *starts, void *out, int out_dtype, float *lse, int queries, int capacity, int heads, \
        int kv_heads, int head_size, int sight, float scale, float cap
#define FORWARD(...)                                                                                                   \
    forward<__VA_ARGS__>(q, q_dtype, k, k_dtype, v, v_dtype, starts, out, out_dtype, lse,                              \
                         {queries, capacity, heads, kv_heads, head_size, sight, scale, cap, {pages, page_shift}})

extern "C" __global__ void __launch_bounds__(TILE_THREADS) attention_forward_64(FORWARD_PARAMETERS) { FORWARD(1, false); }
extern "C" __global__ void __launch_bounds__(TILE_THREADS) attention_forward_128(FORWARD_PARAMETERS) { FORWARD(2, false); }
extern "C" __global__ void __launch_bounds__(TILE_THREADS) attention_forward_256(FORWARD_PARAMETERS) { FORWARD(4, false); }
extern "C" __global__ void __launch_bounds__(TILE_THREADS) attention_forward_256_capped(FORWARD_PARAMETERS) { FORWARD(4, true); }

#define BACKWARD_PARAMETERS                                                                                            \
    const void *q, int q_dtype, const void *k, int k_dtype, const void *v, int v_dtype, const void *out, int out_dtype, \
        const float *lse, const void *dout, int dout_dtype
#define SHAPE_PARAMETERS int queries, int heads, int kv_heads, int head_size, int sight, float scale, float cap
#define BACKWARD_ARGUMENTS q, q_dtype, k, k_dtype, v, v_dtype, out, out_dtype, lse, dout, dout_dtype
#define SHAPE {queries, queries, heads, kv_heads, head_size, sight, scale, cap, {}}

extern "C" __global__ void __launch_bounds__(TILE_THREADS)
attention_dq_64(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    backward_dq<1, false>(BACKWARD_ARGUMENTS, dq, dq_dtype, SHAPE);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
attention_dq_128(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    backward_dq<2, false>(BACKWARD_ARGUMENTS, dq, dq_dtype, SHAPE);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
attention_dq_128_capped(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    backward_dq<2, true>(BACKWARD_ARGUMENTS, dq, dq_dtype, SHAPE);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
attention_dkv_64(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    backward_dkv<1, false>(BACKWARD_ARGUMENTS, dk, dk_dtype, dv, dv_dtype, SHAPE);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
attention_dkv_128(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    backward_dkv<2, false>(BACKWARD_ARGUMENTS, dk, dk_dtype, dv, dv_dtype, SHAPE);
}
extern "C" __global__ void __launch_bounds__(TILE_THREADS, 1)
attention_dkv_128_capped(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    backward_dkv<2, true>(BACKWARD_ARGUMENTS, dk, dk_dtype, dv, dv_dtype, SHAPE);
}
