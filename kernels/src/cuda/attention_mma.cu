// Causal attention on tensor cores: Dao, arXiv 2307.08691. The operation, its symbols, the order of rows and the
// parameters are those of attention.cu, whose kernels take what these do not.
//
//   attention_forward_mma_{64,128}    out, lse        4·K FLOPs a visible pair
//   attention_dq_mma_{64,128}         dq              6·K
//   attention_dkv_mma_{64,128}        dk, dv          8·K
//   …_mma_128_capped                  the same with a cap, as in attention.cu
//
// The suffix is the head size. q, k, v (out and dout) have one dtype, bf16 or f16, and begin at multiples of 16 bytes; the
// results have any, and begin at multiples of 8. Grid: (tiles of results' rows, G, B), 128 threads.
//
// A block's four warps have 16·STACK rows of the result each (of queries' rows, or in the dkv pass of keys), and step
// together over tiles of STEP of the others, which arrive by asynchronous copies while the last tile is used. Both
// products of a tile stay in a warp's registers: in the dkv pass scores are computed transposed, so that they are the left
// side of the second product there too.
//
//                      STACK  rows  STEP  bytes of shared memory
//   forward  64        2      128   64    16 Ki + 2·16 Ki         =  49152
//   forward  128       2      128   32    32 Ki + 2·16 Ki         =  65536
//   dq       64        2      128   32    2·16 Ki + 2·8 Ki        =  49152
//   dq       128       1      64    32    2·16 Ki + 2·16 Ki       =  65536
//   dkv      64        1      64    64    2·8 Ki + 2·24 Ki + 768  =  66304
//   dkv      128       1      64    32    2·16 Ki + 2·24 Ki + 384 =  82304
//
// All are below the 99 KiB of sm_86 and sm_89; two blocks of each fit on sm_80. Registers: at most 255 of 65536/(2·128);
// forward 128 spills six of them on sm_100 and four on sm_120, nothing else any (`cargo xtask cuda-check` prints them).
//
// Bytes from memory: operands and results once; from the L2 cache, keys and values once a block of rows (dkv: rows' operands
// once a block of keys).
//
// Numbers. Scores, sums and rescaling are f32; exponentials are powers of two of scaled scores, within 2 units in the last
// place. Other than in attention.cu, probabilities and their gradients are rounded to the operands' dtype before they are
// multiplied by v, k, q or dout: an error of half a unit of that dtype in every term, of the kind that the operands have
// already. In f16, gradients of scores (before `scale`) beyond 65504 overflow and below 2^-25 vanish, as dout itself would.
//
// Order of sums: within 16 columns or rows that of the hardware, else ascending; tiles ascending. No atomics: each result has
// one writer. Nothing beyond the last visible key is read. Within a tile zeros hide: a value that is not finite reaches rows of
// its warp that do not see it. Tiles that no row of a block sees are not loaded, those that no
// row of a warp sees not multiplied, and only those at the edge of what is visible are masked.
//
// Compiled for sm_80 to sm_120; run emulated and on an H200 (sm_90).

#define WARPS 4
#define THREADS (WARPS * 32)
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f
#define MINUS_INFINITY __uint_as_float(0xFF800000u)

struct Shape {
    int queries, capacity, heads, kv_heads;
    // See `first_key`.
    int sight;
    float scale, cap;
    // Of all sequences one after the other.
    Pages pages;
};

// ---- rows -----------------------------------------------------------------------------------------------------------

// Row r is query r / group of head r % group of those that share a key head.
template <int HEAD> struct QueryRows {
    i64 origin, step;
    int group, end;
    static constexpr bool there = true;

    __device__ __forceinline__ QueryRows(const Shape &shape, int b, int kv_head)
        : step((i64)shape.heads * HEAD), group(shape.heads / shape.kv_heads) {
        origin = (i64)b * shape.queries * step + (i64)kv_head * group * HEAD;
        end = shape.queries * group;
    }
    __device__ __forceinline__ i64 offset(int r) const { return origin + (i64)(r / group) * step + r % group * HEAD; }
};

// Row r is key r; `end`: keys that may be read. In pages the origin is that of a tile's, whose page may not be there.
template <int HEAD> struct KeyRows {
    i64 origin, step;
    int end;
    bool there = true;

    __device__ __forceinline__ KeyRows(const Shape &shape, int b, int kv_head, int end)
        : step((i64)shape.kv_heads * HEAD), end(end) {
        origin = (i64)b * shape.capacity * step + (i64)kv_head * HEAD;
    }
    // The next rows are of the tile that begins with `first`.
    __device__ __forceinline__ void turn_to(const Shape &shape, int first) {
        there = shape.pages.there(blockIdx.z, shape.capacity, first);
        if (!shape.pages.table) return;
        there = shape.pages.there(blockIdx.z, shape.capacity, first);
        origin = (i64)shape.pages.rows_before(blockIdx.z, shape.capacity, first) * step + (i64)blockIdx.y * HEAD;
    }
    __device__ __forceinline__ i64 offset(int r) const { return origin + r * step; }
};

// Starts to copy ROWS rows from `first` on to TILES tiles, each from a matrix of its own with the same layout; zeros beyond
// the end, and of rows that are not there.
template <int HEAD, int ROWS, int TILES, typename Rows>
__device__ __forceinline__ void copy_rows(u16 *tiles, const u16 *const from[TILES], const Rows &rows, int first) {
    // Addresses that are computed at once: what is left of 255 registers has room for them on every generation.
    constexpr int CHUNKS = HEAD / 8;
    [[maybe_unused]] constexpr int AT_ONCE = TILES == 3 ? ROWS * CHUNKS / THREADS : 2;
    int chunk = threadIdx.x % CHUNKS;
#pragma unroll AT_ONCE
    for (int above = 0; above < ROWS; above += THREADS / CHUNKS) {
        int r = above + threadIdx.x / CHUNKS;
        bool valid = rows.there && first + r < rows.end;
        i64 offset = rows.offset(min(first + r, rows.end - 1)) + chunk * 8;
#pragma unroll
        for (int i = 0; i < TILES; i++)
            cp_async_16(tiles + i * ROWS * HEAD + swizzled<HEAD>(r, chunk), from[i] + offset, valid);
    }
}

// ---- products of tiles ----------------------------------------------------------------------------------------------

// products[i][n] = the warp's rows of a times rows 8n .. 8n + 8 of b; tiles of HEAD columns, `a` at the warp's first row.
template <int DTYPE, int HEAD, int STACK, int COLUMNS>
__device__ __forceinline__ void row_products(float products[STACK][COLUMNS][4], const u16 *a, const u16 *b) {
    int down = lane_down<HEAD>(), across = lane_across<HEAD>();
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int n = 0; n < COLUMNS; n++)
#pragma unroll
            for (int j = 0; j < 4; j++) products[i][n][j] = 0.0f;
#pragma unroll
    for (int column = 0; column < HEAD; column += 16) {
        u32 left[STACK][4];
#pragma unroll
        for (int i = 0; i < STACK; i++) ldmatrix_x4(left[i], a + i * 16 * HEAD + (down ^ column));
#pragma unroll
        for (int n = 0; n < COLUMNS; n += 2) {
            u32 right[4];
            ldmatrix_x4(right, b + n * 8 * HEAD + (across ^ column));
            mma_pair<DTYPE, STACK, COLUMNS>(products, n, left, right);
        }
    }
}

// sums[i][c] += Σ_r weights[i][·][r] · row r of b, columns 8c .. 8c + 8: one weight for each of the 8·COLUMNS rows.
template <int DTYPE, int HEAD, int STACK, int COLUMNS>
__device__ __forceinline__ void add_weighted(float sums[STACK][HEAD / 8][4], const float weights[STACK][COLUMNS][4],
                                             const u16 *b) {
    int down = lane_down<HEAD>();
#pragma unroll
    for (int step = 0; step < COLUMNS / 2; step++) {
        u32 left[STACK][4];
#pragma unroll
        for (int i = 0; i < STACK; i++) halves_of_sums<DTYPE, COLUMNS>(left[i], weights[i], step);
#pragma unroll
        for (int column = 0; column < HEAD; column += 16) {
            u32 right[4];
            ldmatrix_x4_trans(right, b + step * 16 * HEAD + (down ^ column));
            mma_pair<DTYPE, STACK, HEAD / 8>(sums, column / 8, left, right);
        }
    }
}

// Over the four lanes that have one row of a fragment.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

// Rows `first` + lane / 4 (and + 8, + 16, …) of a result from sums times a factor of each row.
template <int HEAD, int STACK, typename Rows>
__device__ __forceinline__ void store_rows(void *to, int dtype, const Rows &rows, int first,
                                           const float sums[STACK][HEAD / 8][4], const float factors[STACK][2]) {
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = first + i * 16 + half * 8 + threadIdx.x % 32 / 4;
            if (r >= rows.end) continue;
            i64 at = rows.offset(r) + threadIdx.x % 4 * 2;
#pragma unroll
            for (int c = 0; c < HEAD / 8; c++) {
                float x = sums[i][c][2 * half] * factors[i][half], y = sums[i][c][2 * half + 1] * factors[i][half];
                store_pair(to, dtype, at + 8 * c, x, y, true);
            }
        }
}

// Exponents, in units of a power of two and above `shift`, from a product of q and k, and what the derivative by that has besides
// `scale`.
template <bool CAPPED>
__device__ __forceinline__ float exponent_of(float product, const Shape &shape, float shift, float &slope) {
    if (!CAPPED) {
        slope = 1.0f;
        return product * (shape.scale * LOG2_E) - shift;
    }
    float t = tanhf(product * (shape.scale / shape.cap));
    slope = 1.0f - t * t;
    return t * (shape.cap * LOG2_E) - shift;
}

// Exponents of keys that a row does not see become -inf; rows as in store_rows, keys from `key` on. A pass of its own, which
// most tiles do without; rows beyond the end see nothing.
template <int HEAD, int STACK, int COLUMNS>
__device__ __forceinline__ void hide(float exponents[STACK][COLUMNS][4], const QueryRows<HEAD> &rows, int first, int start,
                                     int key, int sight) {
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = first + i * 16 + half * 8 + threadIdx.x % 32 / 4, position = r < rows.end ? start + r / rows.group : -1;
            int lowest_key = first_key(position, sight);
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    int at = key + 8 * n + threadIdx.x % 4 * 2 + j % 2;
                    if (at > position || at < lowest_key) exponents[i][n][j] = MINUS_INFINITY;
                }
        }
}

// ---- forward --------------------------------------------------------------------------------------------------------

// What a warp knows of its rows while it steps over keys. Scores are in units of a power of two.
template <int STACK> struct Softmax {
    float most[STACK][2];
    // Of this lane's columns.
    float totals[STACK][2];
};

// Exponents of a tile become probabilities over 2^most; `sums` are rescaled.
template <int STACK, int COLUMNS, int SUMS>
__device__ __forceinline__ void soften(float scores[STACK][COLUMNS][4], float sums[STACK][SUMS][4], Softmax<STACK> &rows) {
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = rows.most[i][half];
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) highest = fmaxf(highest, scores[i][n][j]);
            highest = quad_max(highest);
            // A row that has seen no key yet: everything stays zero.
            float shift = highest == MINUS_INFINITY ? 0.0f : highest, sum = 0.0f;
            float keep = exp2_approximate(rows.most[i][half] - shift);
#pragma unroll
            for (int n = 0; n < COLUMNS; n++)
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    scores[i][n][j] = exp2_approximate(scores[i][n][j] - shift);
                    sum += scores[i][n][j];
                }
            rows.totals[i][half] = rows.totals[i][half] * keep + sum;
            rows.most[i][half] = highest;
#pragma unroll
            for (int c = 0; c < SUMS; c++) {
                sums[i][c][2 * half] *= keep;
                sums[i][c][2 * half + 1] *= keep;
            }
        }
}

template <int DTYPE, int HEAD, int STACK, int STEP, bool CAPPED>
__device__ __forceinline__ void forward(const u16 *q, const u16 *k, const u16 *v, const int *starts, void *out, int out_dtype,
                                        float *lse, const Shape &shape) {
    constexpr int ROWS = WARPS * 16 * STACK;
    u16 *q_tile = (u16 *)dynamic_shared, *keys = q_tile + ROWS * HEAD;
    int b = blockIdx.z, kv_head = blockIdx.y, lane = threadIdx.x % 32;
    QueryRows<HEAD> q_rows(shape, b, kv_head);
    // The longest rows of keys are begun first.
    int row = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, warp_row = row + threadIdx.x / 32 * 16 * STACK;
    int start = starts[b];
    int key_end = min(start + min(row + ROWS - 1, q_rows.end - 1) / q_rows.group + 1, shape.capacity);
    int key_first = max(first_key(start + row / q_rows.group, shape.sight), 0) / STEP * STEP;
    KeyRows<HEAD> k_rows(shape, b, kv_head, key_end);
    const u16 *const of_q[1] = {q}, *const of_kv[2] = {k, v};

    copy_rows<HEAD, ROWS, 1>(q_tile, of_q, q_rows, row);
    k_rows.turn_to(shape, key_first);
    copy_rows<HEAD, STEP, 2>(keys, of_kv, k_rows, key_first);
    cp_async_commit();
    // What the warp's rows see: the first row's position, and the last one's.
    int low = start + warp_row / q_rows.group, high = start + min(warp_row + 16 * STACK - 1, q_rows.end - 1) / q_rows.group;
    bool any_row = warp_row < q_rows.end;
    int first_low = first_key(low, shape.sight), first_high = first_key(high, shape.sight);
    Softmax<STACK> rows;
    float sums[STACK][HEAD / 8][4] = {};
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows.most[i][half] = MINUS_INFINITY, rows.totals[i][half] = 0.0f;
        }
    for (int key = key_first, stage = 0; key < key_end; key += STEP, stage ^= 1) {
        // This tile is there, and everybody is done with the last one.
        cp_async_wait<0>();
        __syncthreads();
        const u16 *tile = keys + stage * 2 * STEP * HEAD;
        int next = key + STEP;
        if (next < key_end) {
            k_rows.turn_to(shape, next);
            copy_rows<HEAD, STEP, 2>(keys + (stage ^ 1) * 2 * STEP * HEAD, of_kv, k_rows, next);
        }
        cp_async_commit();
        if (!any_row || key > high || key + STEP - 1 < first_low) continue;
        float scores[STACK][STEP / 8][4];
        row_products<DTYPE, HEAD, STACK, STEP / 8>(scores, q_tile + (warp_row - row) * HEAD, tile);
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float slope;
                    scores[i][n][j] = exponent_of<CAPPED>(scores[i][n][j], shape, 0.0f, slope);
                }
        bool whole = warp_row + 16 * STACK <= q_rows.end && key + STEP - 1 <= low && key >= first_high;
        if (!whole) hide<HEAD, STACK, STEP / 8>(scores, q_rows, warp_row, start, key, shape.sight);
        soften<STACK, STEP / 8, HEAD / 8>(scores, sums, rows);
        add_weighted<DTYPE, HEAD, STACK, STEP / 8>(sums, scores, tile + STEP * HEAD);
    }
    float inverse[STACK][2];
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float total = quad_sum(rows.totals[i][half]);
            inverse[i][half] = 1.0f / total;
            int r = warp_row + i * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && r < q_rows.end) {
                i64 head = (i64)b * shape.heads + kv_head * q_rows.group + r % q_rows.group;
                lse[head * shape.queries + r / q_rows.group] = rows.most[i][half] * LN_2 + logf(total);
            }
        }
    store_rows<HEAD, STACK>(out, out_dtype, q_rows, warp_row, sums, inverse);
}

// ---- backward -------------------------------------------------------------------------------------------------------

template <int DTYPE> __device__ __forceinline__ float dot8(uint4 a, uint4 b) {
    u32 x[4] = {a.x, a.y, a.z, a.w}, y[4] = {b.x, b.y, b.z, b.w};
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        sum += from_half(x[j] & 0xFFFFu, DTYPE) * from_half(y[j] & 0xFFFFu, DTYPE);
        sum += from_half(x[j] >> 16, DTYPE) * from_half(y[j] >> 16, DTYPE);
    }
    return sum;
}

template <int HEAD> __device__ __forceinline__ float row_lse(const float *lse, const Shape &shape, const QueryRows<HEAD> &rows,
                                                             int b, int kv_head, int r) {
    i64 head = (i64)b * shape.heads + kv_head * rows.group + r % rows.group;
    return lse[head * shape.queries + r / rows.group];
}

// C = S and all starts are 0.
template <int DTYPE, int HEAD, int STACK, int STEP, bool CAPPED>
__device__ __forceinline__ void backward_dq(const u16 *q, const u16 *k, const u16 *v, const u16 *out, const float *lse,
                                            const u16 *dout, void *dq, int dq_dtype, const Shape &shape) {
    constexpr int ROWS = WARPS * 16 * STACK;
    u16 *q_tile = (u16 *)dynamic_shared, *dout_tile = q_tile + ROWS * HEAD, *keys = dout_tile + ROWS * HEAD;
    int b = blockIdx.z, kv_head = blockIdx.y, lane = threadIdx.x % 32;
    QueryRows<HEAD> q_rows(shape, b, kv_head);
    int row = (int)(gridDim.x - 1 - blockIdx.x) * ROWS, warp_row = row + threadIdx.x / 32 * 16 * STACK;
    int key_end = min(row + ROWS - 1, q_rows.end - 1) / q_rows.group + 1;
    int key_first = max(first_key(row / q_rows.group, shape.sight), 0) / STEP * STEP;
    KeyRows<HEAD> k_rows(shape, b, kv_head, key_end);
    const u16 *const of_q[2] = {q, dout}, *const of_kv[2] = {k, v};

    copy_rows<HEAD, ROWS, 2>(q_tile, of_q, q_rows, row);
    copy_rows<HEAD, STEP, 2>(keys, of_kv, k_rows, key_first);
    cp_async_commit();
    int low = warp_row / q_rows.group, high = min(warp_row + 16 * STACK - 1, q_rows.end - 1) / q_rows.group;
    bool any_row = warp_row < q_rows.end;
    float lses[STACK][2], deltas[STACK][2], sums[STACK][HEAD / 8][4] = {};
#pragma unroll
    for (int i = 0; i < STACK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = warp_row + i * 16 + half * 8 + lane / 4;
            bool valid = r < q_rows.end;
            lses[i][half] = valid ? row_lse(lse, shape, q_rows, b, kv_head, r) * LOG2_E : 0.0f;
            i64 at = valid ? q_rows.offset(r) : q_rows.origin;
            float delta = 0.0f;
#pragma unroll
            for (int c = lane % 4 * 8; c < HEAD; c += 32)
                delta += dot8<DTYPE>(*(const uint4 *)(out + at + c), *(const uint4 *)(dout + at + c));
            deltas[i][half] = quad_sum(delta);
        }
    for (int key = key_first, stage = 0; key < key_end; key += STEP, stage ^= 1) {
        // This tile is there, and everybody is done with the last one.
        cp_async_wait<0>();
        __syncthreads();
        const u16 *tile = keys + stage * 2 * STEP * HEAD;
        if (key + STEP < key_end) copy_rows<HEAD, STEP, 2>(keys + (stage ^ 1) * 2 * STEP * HEAD, of_kv, k_rows, key + STEP);
        cp_async_commit();
        if (!any_row || key > high || key + STEP - 1 < first_key(low, shape.sight)) continue;
        float scores[STACK][STEP / 8][4], gradients[STACK][STEP / 8][4];
        row_products<DTYPE, HEAD, STACK, STEP / 8>(scores, q_tile + (warp_row - row) * HEAD, tile);
        row_products<DTYPE, HEAD, STACK, STEP / 8>(gradients, dout_tile + (warp_row - row) * HEAD, tile + STEP * HEAD);
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    float slope;
                    scores[i][n][j] = exponent_of<CAPPED>(scores[i][n][j], shape, lses[i][j / 2], slope);
                    gradients[i][n][j] = (gradients[i][n][j] - deltas[i][j / 2]) * slope;
                }
        bool whole = warp_row + 16 * STACK <= q_rows.end && key + STEP - 1 <= low && key >= first_key(high, shape.sight);
        if (!whole) hide<HEAD, STACK, STEP / 8>(scores, q_rows, warp_row, 0, key, shape.sight);
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int n = 0; n < STEP / 8; n++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    scores[i][n][j] = exp2_approximate(scores[i][n][j]) * gradients[i][n][j];
        add_weighted<DTYPE, HEAD, STACK, STEP / 8>(sums, scores, tile);
    }
    float scales[STACK][2];
#pragma unroll
    for (int i = 0; i < STACK; i++) scales[i][0] = scales[i][1] = shape.scale;
    store_rows<HEAD, STACK>(dq, dq_dtype, q_rows, warp_row, sums, scales);
}

// A tile of queries' rows in the dkv pass: q, dout and out of STEP rows, and what is known of each row.
template <int STEP> struct RowFacts {
    // Log-sum-exps are in units of a power of two; rows beyond the end have position -1 and see nothing.
    float lses[STEP], deltas[STEP];
    int positions[STEP];
};

// Four threads a row.
template <int DTYPE, int HEAD, int STEP>
__device__ __forceinline__ void find_facts(RowFacts<STEP> &facts, const u16 *dout_tile, const u16 *out_tile, const float *lse,
                                           const Shape &shape, const QueryRows<HEAD> &rows, int b, int kv_head, int row) {
#pragma unroll
    for (int above = 0; above < STEP; above += THREADS / 4) {
        int at = above + threadIdx.x / 4, r = row + at;
        float delta = 0.0f;
#pragma unroll
        for (int c = 0; c < HEAD / 8; c += 4) {
            int place = swizzled<HEAD>(at, c + threadIdx.x % 4);
            delta += dot8<DTYPE>(*(const uint4 *)(dout_tile + place), *(const uint4 *)(out_tile + place));
        }
        delta = quad_sum(delta);
        if (threadIdx.x % 4 != 0) continue;
        facts.deltas[at] = delta;
        facts.lses[at] = r < rows.end ? row_lse(lse, shape, rows, b, kv_head, r) * LOG2_E : 0.0f;
        facts.positions[at] = r < rows.end ? r / rows.group : -1;
    }
}

// As `hide`, of rows with `facts` and keys that lie as rows in store_rows.
template <int STACK, int STEP>
__device__ __forceinline__ void hide_rows(float exponents[STACK][STEP / 8][4], const RowFacts<STEP> &facts, int warp_key,
                                          int sight) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int parity = 0; parity < 2; parity++) {
            int position = facts.positions[8 * n + lane % 4 * 2 + parity], lowest_key = first_key(position, sight);
#pragma unroll
            for (int i = 0; i < STACK; i++)
#pragma unroll
                for (int j = parity; j < 4; j += 2) {
                    int key = warp_key + i * 16 + lane / 4 + j / 2 * 8;
                    if (key > position || key < lowest_key) exponents[i][n][j] = MINUS_INFINITY;
                }
        }
}

// A warp's part of one tile: keys from warp_key on, rows with `facts`. `whole`: every row sees every key.
template <int DTYPE, int HEAD, int STACK, int STEP, bool CAPPED>
__device__ __forceinline__ void add_dkv(float of_k[STACK][HEAD / 8][4], float of_v[STACK][HEAD / 8][4], const u16 *k_tile,
                                        const u16 *v_tile, const u16 *rows_tile, const RowFacts<STEP> &facts, int warp_key,
                                        const Shape &shape, bool whole) {
    const u16 *q_tile = rows_tile, *dout_tile = rows_tile + STEP * HEAD;
    int column = threadIdx.x % 4 * 2;
    float scores[STACK][STEP / 8][4], gradients[STACK][STEP / 8][4], slopes[STACK][STEP / 8][4];
    row_products<DTYPE, HEAD, STACK, STEP / 8>(scores, k_tile, q_tile);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int j = 0; j < 4; j++)
                scores[i][n][j] =
                    exponent_of<CAPPED>(scores[i][n][j], shape, facts.lses[8 * n + column + j % 2], slopes[i][n][j]);
    if (!whole) hide_rows<STACK, STEP>(scores, facts, warp_key, shape.sight);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) scores[i][n][j] = exp2_approximate(scores[i][n][j]);
    add_weighted<DTYPE, HEAD, STACK, STEP / 8>(of_v, scores, dout_tile);
    row_products<DTYPE, HEAD, STACK, STEP / 8>(gradients, v_tile, dout_tile);
#pragma unroll
    for (int n = 0; n < STEP / 8; n++)
#pragma unroll
        for (int i = 0; i < STACK; i++)
#pragma unroll
            for (int j = 0; j < 4; j++) {
                scores[i][n][j] *= gradients[i][n][j] - facts.deltas[8 * n + column + j % 2];
                if (CAPPED) scores[i][n][j] *= slopes[i][n][j];
            }
    add_weighted<DTYPE, HEAD, STACK, STEP / 8>(of_k, scores, q_tile);
}

template <int DTYPE, int HEAD, int STACK, int STEP, bool CAPPED>
__device__ __forceinline__ void backward_dkv(const u16 *q, const u16 *k, const u16 *v, const u16 *out, const float *lse,
                                             const u16 *dout, void *dk, int dk_dtype, void *dv, int dv_dtype,
                                             const Shape &shape) {
    constexpr int KEYS = WARPS * 16 * STACK;
    u16 *k_tile = (u16 *)dynamic_shared, *v_tile = k_tile + KEYS * HEAD, *tiles = v_tile + KEYS * HEAD;
    RowFacts<STEP> &facts = *(RowFacts<STEP> *)(tiles + 2 * 3 * STEP * HEAD);
    int b = blockIdx.z, kv_head = blockIdx.y;
    int key = blockIdx.x * KEYS, warp_key = key + threadIdx.x / 32 * 16 * STACK, last_key = warp_key + 16 * STACK - 1;
    QueryRows<HEAD> q_rows(shape, b, kv_head);
    KeyRows<HEAD> k_rows(shape, b, kv_head, shape.capacity);
    const u16 *const of_q[3] = {q, dout, out}, *const of_kv[2] = {k, v};
    // Rows that see one of these keys: from the first key's own query to the last one that sees the last key.
    int query_last = (int)min(last_query(key + KEYS - 1, shape.sight), (i64)shape.queries - 1);
    int row_first = key * q_rows.group / STEP * STEP, row_end = (query_last + 1) * q_rows.group;

    copy_rows<HEAD, KEYS, 2>(k_tile, of_kv, k_rows, key);
    copy_rows<HEAD, STEP, 3>(tiles, of_q, q_rows, row_first);
    cp_async_commit();
    float of_k[STACK][HEAD / 8][4] = {}, of_v[STACK][HEAD / 8][4] = {};
    for (int row = row_first, stage = 0; row < row_end; row += STEP, stage ^= 1) {
        // This tile is there, and everybody is done with the last one.
        cp_async_wait<0>();
        __syncthreads();
        const u16 *tile = tiles + stage * 3 * STEP * HEAD;
        if (row + STEP < row_end) copy_rows<HEAD, STEP, 3>(tiles + (stage ^ 1) * 3 * STEP * HEAD, of_q, q_rows, row + STEP);
        cp_async_commit();
        find_facts<DTYPE, HEAD, STEP>(facts, tile + STEP * HEAD, tile + 2 * STEP * HEAD, lse, shape, q_rows, b, kv_head, row);
        __syncthreads();
        // The tile's first query and its last one.
        int low = row / q_rows.group, high = min(row + STEP - 1, q_rows.end - 1) / q_rows.group;
        if (high < warp_key || first_key(low, shape.sight) > last_key) continue;
        bool whole = row + STEP <= q_rows.end && low >= last_key && first_key(high, shape.sight) <= warp_key;
        int above = (warp_key - key) * HEAD;
        add_dkv<DTYPE, HEAD, STACK, STEP, CAPPED>(of_k, of_v, k_tile + above, v_tile + above, tile, facts, warp_key, shape, whole);
    }
    float scales[STACK][2], one[STACK][2];
#pragma unroll
    for (int i = 0; i < STACK; i++) {
        scales[i][0] = scales[i][1] = shape.scale;
        one[i][0] = one[i][1] = 1.0f;
    }
    store_rows<HEAD, STACK>(dk, dk_dtype, k_rows, warp_key, of_k, scales);
    store_rows<HEAD, STACK>(dv, dv_dtype, k_rows, warp_key, of_v, one);
}

// ---- kernels --------------------------------------------------------------------------------------------------------

// The parameters of attention.cu's kernels, of which the dtypes of v, out and dout, and the head size, are known here.
#define FORWARD_PARAMETERS                                                                                             \
    const void *q, int q_dtype, const void *k, int, const void *v, int, const int *pages, int page_shift,              \
        const int *starts, void *out, int out_dtype, float *lse, int queries, int capacity, int heads, int kv_heads,   \
        int, int sight, float scale, float cap
#define FORWARD(...)                                                                                                   \
    Shape shape = {queries, capacity, heads, kv_heads, sight, scale, cap, {pages, page_shift}};                       \
    const u16 *q16 = (const u16 *)q, *k16 = (const u16 *)k, *v16 = (const u16 *)v;                                     \
    if (q_dtype == BF16) {                                                                                             \
        forward<BF16, __VA_ARGS__>(q16, k16, v16, starts, out, out_dtype, lse, shape);                                 \
    } else {                                                                                                           \
        forward<F16, __VA_ARGS__>(q16, k16, v16, starts, out, out_dtype, lse, shape);                                  \
    }

extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward_mma_64(FORWARD_PARAMETERS) { FORWARD(64, 2, 64, false) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward_mma_128(FORWARD_PARAMETERS) { FORWARD(128, 2, 32, false) }
extern "C" __global__ void __launch_bounds__(THREADS, 2) attention_forward_mma_128_capped(FORWARD_PARAMETERS) {
    FORWARD(128, 2, 32, true)
}

#define BACKWARD_PARAMETERS                                                                                            \
    const void *q, int q_dtype, const void *k, int, const void *v, int, const void *out, int, const float *lse,        \
        const void *dout, int
#define SHAPE_PARAMETERS int queries, int heads, int kv_heads, int, int sight, float scale, float cap
#define BACKWARD(PASS, HEAD, STACK, STEP, CAPPED, ...)                                                                 \
    Shape shape = {queries, queries, heads, kv_heads, sight, scale, cap, {}};                                         \
    const u16 *q16 = (const u16 *)q, *k16 = (const u16 *)k, *v16 = (const u16 *)v;                                     \
    const u16 *out16 = (const u16 *)out, *dout16 = (const u16 *)dout;                                                  \
    if (q_dtype == BF16) {                                                                                             \
        PASS<BF16, HEAD, STACK, STEP, CAPPED>(q16, k16, v16, out16, lse, dout16, __VA_ARGS__, shape);                  \
    } else {                                                                                                           \
        PASS<F16, HEAD, STACK, STEP, CAPPED>(q16, k16, v16, out16, lse, dout16, __VA_ARGS__, shape);                   \
    }

extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dq_mma_64(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dq, 64, 2, 32, false, dq, dq_dtype)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dq_mma_128(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dq, 128, 1, 32, false, dq, dq_dtype)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dq_mma_128_capped(BACKWARD_PARAMETERS, void *dq, int dq_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dq, 128, 1, 32, true, dq, dq_dtype)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dkv_mma_64(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dkv, 64, 1, 64, false, dk, dk_dtype, dv, dv_dtype)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dkv_mma_128(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dkv, 128, 1, 32, false, dk, dk_dtype, dv, dv_dtype)
}
extern "C" __global__ void __launch_bounds__(THREADS, 2)
attention_dkv_mma_128_capped(BACKWARD_PARAMETERS, void *dk, int dk_dtype, void *dv, int dv_dtype, SHAPE_PARAMETERS) {
    BACKWARD(backward_dkv, 128, 1, 32, true, dk, dk_dtype, dv, dv_dtype)
}
