// Columns of matrices, which move between matrices of different widths.
//
//   columns_copy    out[r, to + c] = x[r / group, from + c], bit by bit
//   columns_clear   out[r, at + c] = 0
//   columns_fold    out[r, to + c] = Σ_i x[r·group + i, from + c], i ascending in f32
//
// Each for c < width; rows of x and out are `x_width` and `out_width` long. A copy and a clear move bits: what is counted in a row is
// counted in units of 16 bytes where all of it is whole and aligned, else in elements, of 4 or 2.
//
// A block takes as many rows at a time as it has threads for: a row has a power of two of `lanes`, at most 256, each with every
// lanes-th unit, or eight columns, of it. Bytes: what moves once, from x as often as rows share it, which are neighbours. FLOPs: one a
// term after the first.

// The first row of a thread, and how many rows later its next one is.
struct Turns {
    i64 first, step;
    int lane;

    __device__ __forceinline__ Turns(int lanes) {
        int rows = blockDim.x / lanes;
        first = (i64)blockIdx.x * rows + threadIdx.x / lanes;
        step = (i64)gridDim.x * rows;
        lane = threadIdx.x % lanes;
    }
};

template <typename Unit>
__device__ __forceinline__ void copy_units(const Unit *x, Unit *out, i64 rows, i64 group, i64 x_width, i64 from, i64 out_width, i64 to,
                                           i64 width, int lanes) {
    Turns turns(lanes);
    for (i64 r = turns.first; r < rows; r += turns.step) {
        const Unit *source = x + (group == 1 ? r : r / group) * x_width + from;
        Unit *target = out + r * out_width + to;
        for (i64 c = turns.lane; c < width; c += lanes) target[c] = source[c];
    }
}

extern "C" __global__ void __launch_bounds__(256)
columns_copy(const void *x, void *out, int unit, i64 rows, i64 group, i64 x_width, i64 from, i64 out_width, i64 to, i64 width, int lanes) {
    if (unit == 16)
        copy_units((const uint4 *)x, (uint4 *)out, rows, group, x_width, from, out_width, to, width, lanes);
    else if (unit == 4)
        copy_units((const u32 *)x, (u32 *)out, rows, group, x_width, from, out_width, to, width, lanes);
    else
        copy_units((const u16 *)x, (u16 *)out, rows, group, x_width, from, out_width, to, width, lanes);
}

template <typename Unit>
__device__ __forceinline__ void clear_units(Unit *out, i64 rows, i64 out_width, i64 at, i64 width, int lanes, Unit zero) {
    Turns turns(lanes);
    for (i64 r = turns.first; r < rows; r += turns.step)
        for (i64 c = turns.lane; c < width; c += lanes) out[r * out_width + at + c] = zero;
}

extern "C" __global__ void __launch_bounds__(256)
columns_clear(void *out, int unit, i64 rows, i64 out_width, i64 at, i64 width, int lanes) {
    if (unit == 16)
        clear_units((uint4 *)out, rows, out_width, at, width, lanes, make_uint4(0, 0, 0, 0));
    else if (unit == 4)
        clear_units((u32 *)out, rows, out_width, at, width, lanes, 0u);
    else
        clear_units((u16 *)out, rows, out_width, at, width, lanes, (u16)0);
}

extern "C" __global__ void __launch_bounds__(256)
columns_fold(const void *x, void *out, int dtype, i64 rows, i64 group, i64 x_width, i64 from, i64 out_width, i64 to, i64 width, int lanes) {
    bool vector = aligned16(x) && aligned16(out) && (x_width | from | out_width | to) % 8 == 0;
    Turns turns(lanes);
    for (i64 r = turns.first; r < rows; r += turns.step) {
        for (i64 c = 8 * turns.lane; c < width; c += 8 * lanes) {
            int count = (int)min(width - c, (i64)8);
            float sum[8], v[8];
            i64 at = r * group * x_width + from + c;
            load8_or_less(x, dtype, at, count, vector, sum);
            for (i64 i = 1; i < group; i++) {
                load8_or_less(x, dtype, at + i * x_width, count, vector, v);
#pragma unroll
                for (int j = 0; j < 8; j++) sum[j] += v[j];
            }
            store8_or_less(out, dtype, r * out_width + to + c, count, vector, sum);
        }
    }
}
