// Table look-up.
//
//   embedding_gather        out[t] = table[ids[t]]; ids [tokens], table [V, width]
//   embedding_scatter_add   dtable[ids[t]] += dout[t] in increasing t; dtable f32 [V, width]
//
// Bytes: gather tokens·width twice; scatter_add dout once, the rows of dtable that occur once or more, and ids
// tokens times (from the cache: a block reads all of them). One FLOP an element of dout.
//
// Determinism of scatter_add: a row of dtable belongs to the block of the first token that names it. That block walks
// the ids in order and adds the rows it finds; blocks of later tokens with the same id leave. Sorting the ids would
// spare the tokens² comparisons, but needs memory, and at 16 Ki tokens they are 256 Mi, hidden by the rows' traffic.

extern "C" __global__ void __launch_bounds__(256)
embedding_gather(const int *ids, const void *table, int table_dtype, void *out, int out_dtype, i64 tokens, i64 width) {
    bool vector = width % 8 == 0 && aligned16(table) && aligned16(out);
    for (i64 t = blockIdx.x; t < tokens; t += gridDim.x) {
        i64 from = (i64)ids[t] * width, to = t * width;
        for (i64 c = 8 * threadIdx.x; c < width; c += 8 * blockDim.x) {
            int count = (int)min(width - c, (i64)8);
            float x[8];
            load8_or_less(table, table_dtype, from + c, count, vector, x);
            store8_or_less(out, out_dtype, to + c, count, vector, x);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256)
embedding_scatter_add(const int *ids, const void *dout, int dout_dtype, float *dtable, i64 tokens, i64 width) {
    // Tokens of a stretch of ids that name the row, in order.
    __shared__ int found[256];
    __shared__ int counts[8];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (i64 first = blockIdx.x; first < tokens; first += gridDim.x) {
        int id = ids[first];
        int earlier = 0;
        for (i64 t = threadIdx.x; t < first; t += 256) earlier |= ids[t] == id;
        if (__syncthreads_or(earlier)) continue;
        float *row = dtable + (i64)id * width;
        for (i64 start = first; start < tokens; start += 256) {
            i64 t = start + threadIdx.x;
            bool mine = t < tokens && ids[t] == id;
            unsigned votes = __ballot_sync(ALL_LANES, mine);
            if (lane == 0) counts[warp] = __popc(votes);
            __syncthreads();
            int before = 0, total = 0;
            for (int w = 0; w < 8; w++) {
                if (w < warp) before += counts[w];
                total += counts[w];
            }
            if (mine) found[before + __popc(votes & ((1u << lane) - 1))] = threadIdx.x;
            __syncthreads();
            // What follows reads `found` alone, which is not written before all have come to the next barrier.
            if (total == 0) continue;
            for (i64 c = threadIdx.x; c < width; c += 256) {
                float sum = row[c];
                for (int i = 0; i < total; i++) sum += load(dout, dout_dtype, (start + found[i]) * width + c);
                row[c] = sum;
            }
        }
    }
}
