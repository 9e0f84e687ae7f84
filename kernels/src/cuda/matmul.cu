// Matrix products without tensor cores: what runs where cuBLASLt is missing.
//
//   matmul_plain   out[m, n] = Σ_l op(a)[m, l] · op(b)[l, n] + bias[n] + residual[m, n],  l ascending, in f32
//
// Bias and residual may be missing, and the residual may be out (see `Epilogue`). They are a FLOP each for an element.
// op(a) is a [m, l], or stored [l, m] with `trans_a`; op(b) is b [l, n], or stored [n, l] with `trans_b`. FLOPs: 2·m·n·l.
// Bytes from the L2 cache: each operand once per tile of 64 rows of the other.
//
// A block of 256 threads computes a tile of 64 × 64 outputs, sixteen a thread, from slabs of 16 inner indices in shared
// memory (`tile_product`); where an operand is contiguous along the inner index the slab is transposed on the way in.

#define SLAB 16

// A slab of 64 rows and 16 inner indices of an operand, as `to[inner][row]`. The element at (row, inner) is
// from[row·row_stride + inner·inner_stride]; one of the strides is 1. Beyond the operand's ends there are zeros.
__device__ __forceinline__ void load_slab(float *to, const void *from, int dtype, i64 row, i64 rows, i64 row_stride,
                                          i64 inner, i64 inners, i64 inner_stride, bool vector) {
    // Half the threads load eight elements each, neighbours in memory.
    int t = threadIdx.x;
    if (t >= 128) return;
    float x[8];
    if (inner_stride == 1) {
        int r = t / 2, d = t % 2 * 8;
        i64 left = row + r < rows ? inners - inner - d : 0;
        load8_or_less(from, dtype, (row + r) * row_stride + inner + d, (int)max(min(left, (i64)8), (i64)0), vector, x);
#pragma unroll
        for (int j = 0; j < 8; j++) to[(d + j) * TILE_STRIDE + r] = x[j];
    } else {
        int d = t / 8, r = t % 8 * 8;
        i64 left = inner + d < inners ? rows - row - r : 0;
        load8_or_less(from, dtype, (inner + d) * inner_stride + row + r, (int)max(min(left, (i64)8), (i64)0), vector, x);
#pragma unroll
        for (int j = 0; j < 8; j++) to[d * TILE_STRIDE + r + j] = x[j];
    }
}

// One block a tile, tiles of a row of tiles next to each other.
extern "C" __global__ void __launch_bounds__(TILE_THREADS)
matmul_plain(const void *a, int a_dtype, int trans_a, const void *b, int b_dtype, int trans_b, void *out, int out_dtype,
             const void *bias, int bias_dtype, const void *residual, int residual_dtype, i64 m, i64 n, i64 l) {
    Epilogue epilogue = {bias, bias_dtype, residual, residual_dtype};
    float *a_slab = (float *)dynamic_shared, *b_slab = a_slab + SLAB * TILE_STRIDE;
    i64 across = (n + TILE - 1) / TILE;
    i64 row = blockIdx.x / across * TILE, column = blockIdx.x % across * TILE;
    bool a_vector = aligned16(a) && (trans_a ? m : l) % 8 == 0, b_vector = aligned16(b) && (trans_b ? l : n) % 8 == 0;
    float sums[4][4] = {};
    for (i64 inner = 0; inner < l; inner += SLAB) {
        load_slab(a_slab, a, a_dtype, row, m, trans_a ? 1 : l, inner, l, trans_a ? m : 1, a_vector);
        load_slab(b_slab, b, b_dtype, column, n, trans_b ? l : 1, inner, l, trans_b ? 1 : n, b_vector);
        __syncthreads();
        tile_product(sums, a_slab, b_slab, SLAB);
        __syncthreads();
    }
    int y = threadIdx.x / 16, x = threadIdx.x % 16;
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            i64 r = row + 4 * y + i, c = column + 4 * x + j;
            if (r >= m || c >= n) continue;
            i64 at = r * n + c;
            store(out, out_dtype, at, finished(epilogue, at, c, sums[i][j]));
        }
}
