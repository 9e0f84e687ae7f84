// Adam and AdamW on training state, in place: one kernel a state format.
//
//   adam_fp32      weight f32 (its own master), or weight bf16 or f16 and master f32; m and v f32
//   adam_split     weight bf16 and the lower 16 bits of the master; m and v f32
//   adam_bf16      as adam_split with m and v bf16, rounded at random
//   adam_compact   weight bf16 and an 8-bit remainder; m and v in blocks of 64 codes of 8 bits and a bf16 scale
//
// Operands are runs of n parameters from the start of a pair (adam_bf16) or block (adam_compact). Formula, formats and noise are
// those of terrace-optimizer (`algorithm/adam.rs`, `split.rs`, `store/`), whose loops are the reference, and **the bits are
// the same**: every operation here is one of theirs, in their order, rounded by itself (`__f*_rn`, which no compiler
// contracts), subnormals are kept, and NaNs, whose bits no processor promises, are replaced before they are stored. What
// depends on a gradient's bits (noise) takes them by shifts, not by conversions.
//
// Bytes a parameter: gradient 2 or 4 read; state read and written: fp32 12 (f32) or 12 and 2 more written, split 12, bf16 8,
// compact 5 1/16. About 15 FLOPs a parameter, one square root and one division among them: memory bounds all of it.
//
// A thread of the first three has four neighbouring parameters, which are 16 bytes of f32 and 8 of the others; where an
// address does not allow it, or the run ends, they are moved one by one.

struct Step {
    float grad_scale, decay;
    int decoupled;
    // Where a moving mean starts from, and how far it goes.
    int lerp_from_gradient;
    float lerp, beta2, beta2_rest, bias2_sqrt_inverse, eps, step_size_negative;
    u32 seed;
};

// In the order of `Step`; kernels/src/cuda/update.rs has the same.
#define STEP_PARAMETERS                                                                                                \
    float grad_scale, float decay, int decoupled, int lerp_from_gradient, float lerp, float beta2, float beta2_rest,   \
        float bias2_sqrt_inverse, float eps, float step_size_negative, u32 seed
#define STEP                                                                                                           \
    {grad_scale, decay, decoupled, lerp_from_gradient, lerp, beta2, beta2_rest, bias2_sqrt_inverse, eps,               \
     step_size_negative, seed}

// ---- the formula ----------------------------------------------------------------------------------------------------

// The master and the moments of a parameter after the step; not canonical yet.
__device__ __forceinline__ void update(const Step &step, float gradient, float &master, float &m, float &v) {
    float g = __fmul_rn(gradient, step.grad_scale);
    // Without decay nothing is added: it would turn -0 into 0 or an infinite weight into NaN.
    if (!step.decoupled && step.decay != 0.0f) g = __fadd_rn(g, __fmul_rn(step.decay, master));
    v = __fadd_rn(__fmul_rn(v, step.beta2), __fmul_rn(__fmul_rn(step.beta2_rest, g), g));
    float divisor = __fadd_rn(__fmul_rn(__fsqrt_rn(v), step.bias2_sqrt_inverse), step.eps);
    if (step.decoupled) master = __fmul_rn(master, step.decay);
    m = __fadd_rn(step.lerp_from_gradient ? g : m, __fmul_rn(step.lerp, __fsub_rn(g, m)));
    master = __fadd_rn(master, __fdiv_rn(__fmul_rn(step.step_size_negative, m), divisor));
}

// ---- bits of floats -------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 magnitude(float x) { return __float_as_uint(x) & 0x7FFFFFFFu; }

// The bits of x, with one pattern for all NaNs.
__device__ __forceinline__ u32 canonical(float x) {
    return magnitude(x) > 0x7F800000u ? 0x7FC00000u : __float_as_uint(x);
}

// The bits of an f16 widened to f32: exact, and NaNs keep their payload.
__device__ __forceinline__ u32 widened_f16(u32 bits) {
    const u32 rebase = (127u - 15u) << 23, smallest_normal = (127u - 14u) << 23;
    u32 sign = (bits & 0x8000u) << 16, rest = (bits & 0x7FFFu) << 13;
    u32 wide = rest + (rest >= 31u << 23 ? 2 * rebase : rebase);
    float small = __uint_as_float(rest + smallest_normal) - __uint_as_float(smallest_normal);
    return sign | (rest < 1u << 23 ? __float_as_uint(small) : wide);
}

// A canonical master as f16: to nearest even.
__device__ __forceinline__ u32 narrowed_f16(u32 bits) {
    const u32 infinite = (127u + 16u) << 23, smallest_normal = (127u - 14u) << 23;
    u32 rest = bits & 0x7FFFFFFFu, nan = rest > 0x7F800000u ? 0x200u : 0u, finite = min(rest, infinite);
    u32 normal = ((finite + 0xFFFu + (finite >> 13 & 1u)) >> 13) - ((127u - 15u) << 10);
    // The spacing of f32 at a half is that of the subnormals of f16.
    u32 small = __float_as_uint(__uint_as_float(finite) + 0.5f) - __float_as_uint(0.5f);
    return (finite < smallest_normal ? small : normal) | nan | (bits >> 16 & 0x8000u);
}

// A canonical master as bf16: to nearest, ties away from zero, so that 16 signed bits hold the remainder.
__device__ __forceinline__ u32 rounded_bf16(u32 bits) { return (bits + 0x8000u) >> 16; }

// ---- random bits ----------------------------------------------------------------------------------------------------

// 16 bits for each of two neighbouring parameters: of the even one in the lower half. `masters` has 16 bits of each.
__device__ __forceinline__ u32 noise_of_pair(u32 seed, u32 even_gradient, u32 odd_gradient, u32 masters) {
    u32 gradients = even_gradient >> 16 | (odd_gradient & 0xFFFF0000u);
    return (gradients ^ masters ^ seed) * 0x9E3779B1u;
}

// ---- four neighbouring elements -------------------------------------------------------------------------------------

__device__ __forceinline__ bool aligned(const void *at, u32 bytes) { return ((u64)at & (bytes - 1)) == 0; }

// Elements i .. i + count of an array of 32-bit words, zero beyond; `vector`: all four may be moved at once.
__device__ __forceinline__ void load4_words(const void *from, i64 i, int count, bool vector, u32 x[4]) {
    const u32 *at = (const u32 *)from + i;
    if (vector && count == 4) {
        uint4 words = *(const uint4 *)at;
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = j < count ? at[j] : 0u;
}

__device__ __forceinline__ void store4_words(void *to, i64 i, int count, bool vector, const u32 x[4]) {
    u32 *at = (u32 *)to + i;
    if (vector && count == 4) {
        *(uint4 *)at = make_uint4(x[0], x[1], x[2], x[3]);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < count) at[j] = x[j];
}

// The same for 16-bit elements.
__device__ __forceinline__ void load4_halves(const void *from, i64 i, int count, bool vector, u32 x[4]) {
    const u16 *at = (const u16 *)from + i;
    if (vector && count == 4) {
        uint2 words = *(const uint2 *)at;
        x[0] = words.x & 0xFFFFu, x[1] = words.x >> 16, x[2] = words.y & 0xFFFFu, x[3] = words.y >> 16;
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = j < count ? at[j] : 0u;
}

__device__ __forceinline__ void store4_halves(void *to, i64 i, int count, bool vector, const u32 x[4]) {
    u16 *at = (u16 *)to + i;
    if (vector && count == 4) {
        *(uint2 *)at = make_uint2(x[0] | x[1] << 16, x[2] | x[3] << 16);
        return;
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
        if (j < count) at[j] = (u16)x[j];
}

// The bits of a 16-bit gradient widened to f32.
__device__ __forceinline__ u32 widened(u32 half, int dtype) { return dtype == BF16 ? half << 16 : widened_f16(half); }

// The bits of gradients as f32.
__device__ __forceinline__ void load4_gradients(const void *from, int dtype, i64 i, int count, bool vector, u32 x[4]) {
    if (dtype == F32) {
        load4_words(from, i, count, vector, x);
        return;
    }
    load4_halves(from, i, count, vector, x);
#pragma unroll
    for (int j = 0; j < 4; j++) x[j] = widened(x[j], dtype);
}

// Whether four elements from any multiple of four on can be moved at once.
__device__ __forceinline__ bool aligned4(const void *at, int dtype) { return aligned(at, dtype == F32 ? 16 : 8); }

// `work(i, count)` for parameters i .. i + count, four or what is left of n.
template <typename Work> __device__ __forceinline__ void for_fours(i64 n, Work work) {
    i64 thread = (i64)blockIdx.x * blockDim.x + threadIdx.x, threads = (i64)gridDim.x * blockDim.x;
    for (i64 i = 4 * thread; i < n; i += 4 * threads) work(i, (int)min(n - i, (i64)4));
}

// The step for four parameters whose moments are f32: bits in, canonical bits out.
__device__ __forceinline__ void update4(const Step &step, const u32 g[4], u32 p[4], u32 m[4], u32 v[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float master = __uint_as_float(p[j]), first = __uint_as_float(m[j]), second = __uint_as_float(v[j]);
        update(step, __uint_as_float(g[j]), master, first, second);
        p[j] = canonical(master), m[j] = canonical(first), v[j] = canonical(second);
    }
}

// Masters from bf16 weights and signed 16-bit remainders, and back.
__device__ __forceinline__ void join4(const u32 high[4], const u32 low[4], u32 p[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) p[j] = (high[j] << 16) + (u32)(int)(short)low[j];
}

__device__ __forceinline__ void split4(const u32 p[4], u32 high[4], u32 low[4]) {
#pragma unroll
    for (int j = 0; j < 4; j++) high[j] = rounded_bf16(p[j]), low[j] = p[j] & 0xFFFFu;
}

// ---- formats without a scale ----------------------------------------------------------------------------------------

// `masters` is not looked at where weights are f32.
extern "C" __global__ void __launch_bounds__(256)
adam_fp32(const void *gradient, int gradient_dtype, void *weight, int weight_dtype, void *masters, void *m, void *v, i64 n,
          STEP_PARAMETERS) {
    const Step step = STEP;
    void *master = weight_dtype == F32 ? weight : masters;
    bool vector = aligned4(gradient, gradient_dtype) && aligned4(weight, weight_dtype) && aligned4(master, F32) &&
                  aligned4(m, F32) && aligned4(v, F32);
    for_fours(n, [=](i64 i, int count) {
        u32 g[4], p[4], first[4], second[4];
        load4_gradients(gradient, gradient_dtype, i, count, vector, g);
        load4_words(master, i, count, vector, p);
        load4_words(m, i, count, vector, first);
        load4_words(v, i, count, vector, second);
        update4(step, g, p, first, second);
        store4_words(master, i, count, vector, p);
        store4_words(m, i, count, vector, first);
        store4_words(v, i, count, vector, second);
        if (weight_dtype == F32) return;
#pragma unroll
        for (int j = 0; j < 4; j++) p[j] = weight_dtype == BF16 ? rounded_bf16(p[j]) : narrowed_f16(p[j]);
        store4_halves(weight, i, count, vector, p);
    });
}

extern "C" __global__ void __launch_bounds__(256)
adam_split(const void *gradient, int gradient_dtype, void *weight, void *rest, void *m, void *v, i64 n, STEP_PARAMETERS) {
    const Step step = STEP;
    bool vector = aligned4(gradient, gradient_dtype) && aligned4(weight, BF16) && aligned4(rest, BF16) &&
                  aligned4(m, F32) && aligned4(v, F32);
    for_fours(n, [=](i64 i, int count) {
        u32 g[4], high[4], low[4], p[4], first[4], second[4];
        load4_gradients(gradient, gradient_dtype, i, count, vector, g);
        load4_halves(weight, i, count, vector, high);
        load4_halves(rest, i, count, vector, low);
        load4_words(m, i, count, vector, first);
        load4_words(v, i, count, vector, second);
        join4(high, low, p);
        update4(step, g, p, first, second);
        split4(p, high, low);
        store4_halves(weight, i, count, vector, high);
        store4_halves(rest, i, count, vector, low);
        store4_words(m, i, count, vector, first);
        store4_words(v, i, count, vector, second);
    });
}

extern "C" __global__ void __launch_bounds__(256)
adam_bf16(const void *gradient, int gradient_dtype, void *weight, void *rest, void *m, void *v, i64 n, STEP_PARAMETERS) {
    const Step step = STEP;
    bool vector = aligned4(gradient, gradient_dtype) && aligned4(weight, BF16) && aligned4(rest, BF16) &&
                  aligned4(m, BF16) && aligned4(v, BF16);
    for_fours(n, [=](i64 i, int count) {
        u32 g[4], high[4], low[4], p[4], first[4], second[4];
        load4_gradients(gradient, gradient_dtype, i, count, vector, g);
        load4_halves(weight, i, count, vector, high);
        load4_halves(rest, i, count, vector, low);
        load4_halves(m, i, count, vector, first);
        load4_halves(v, i, count, vector, second);
        u32 noise[2] = {noise_of_pair(step.seed, g[0], g[1], low[0] | low[1] << 16),
                        noise_of_pair(step.seed, g[2], g[3], low[2] | low[3] << 16)};
        join4(high, low, p);
#pragma unroll
        for (int j = 0; j < 4; j++) first[j] <<= 16, second[j] <<= 16;
        update4(step, g, p, first, second);
        split4(p, high, low);
        // Rounded away from zero with the probability that the discarded bits say.
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 random = j % 2 == 0 ? noise[j / 2] & 0xFFFFu : noise[j / 2] >> 16;
            first[j] = (first[j] + random) >> 16, second[j] = (second[j] + random) >> 16;
        }
        store4_halves(weight, i, count, vector, high);
        store4_halves(rest, i, count, vector, low);
        store4_halves(m, i, count, vector, first);
        store4_halves(v, i, count, vector, second);
    });
}

// ---- blocks of 8-bit codes ------------------------------------------------------------------------------------------

// Parameters of a block, the bytes of its codes and its scale, and the threads that share it.
#define BLOCK 64
#define BLOCK_BYTES 66
#define BLOCK_THREADS 16

// The bits of the largest magnitude there is a code for.
#define LARGEST (253u << 23 | 0x77FFFFu)

// Four bytes at any address, or at an even one, or at a multiple of four.
__device__ __forceinline__ u32 load_bytes4(const u8 *at, bool even, bool word) {
    if (word) return *(const u32 *)at;
    if (even) return ((const u16 *)at)[0] | (u32)((const u16 *)at)[1] << 16;
    return at[0] | (u32)at[1] << 8 | (u32)at[2] << 16 | (u32)at[3] << 24;
}

__device__ __forceinline__ void store_bytes4(u8 *at, bool even, bool word, u32 bytes) {
    if (word) {
        *(u32 *)at = bytes;
    } else if (even) {
        ((u16 *)at)[0] = (u16)bytes, ((u16 *)at)[1] = (u16)(bytes >> 16);
    } else {
        at[0] = (u8)bytes, at[1] = (u8)(bytes >> 8), at[2] = (u8)(bytes >> 16), at[3] = (u8)(bytes >> 24);
    }
}

// The smallest scale's exponent in the encoding of f32; with less, what is made of the smallest codes would be subnormal.
#define SMALLEST_SCALE 24u

__device__ __forceinline__ u32 load_scale(const u8 *at) {
    return max((at[0] | (u32)at[1] << 8) >> 7, SMALLEST_SCALE);
}

// The scale for values up to the magnitude `largest`, in bits.
__device__ __forceinline__ u32 scale_for(u32 largest) { return max((largest + (1u << 19)) >> 23, SMALLEST_SCALE); }

// A moment's codes: with a sign 3 bits of exponent, else 4; 4 bits of mantissa.
template <bool SIGNED> struct Codes {
    static constexpr u32 TOP = SIGNED ? 7 : 15;
    static constexpr u32 MAGNITUDE = (SIGNED ? 0x7Fu : 0xFFu) << 19;

    // The bits of 2^-TOP times the scale, and the smallest value with an exponent of its own.
    static __device__ __forceinline__ u32 base(u32 scale) { return (scale - TOP) << 23; }
    static __device__ __forceinline__ float knee(u32 scale) { return __uint_as_float((scale + 1 - TOP) << 23); }

    // The value of a code in bits 24 and up.
    static __device__ __forceinline__ float decode(u32 code, u32 scale) {
        float value = __uint_as_float((code >> 5 & MAGNITUDE) + base(scale));
        float small = __fsub_rn(__fadd_rn(value, value), knee(scale));
        if (small < value) value = small;
        return SIGNED ? __uint_as_float(__float_as_uint(value) | (code & 0x80000000u)) : value;
    }

    // What there is a code for instead of a value.
    static __device__ __forceinline__ float tamed(float x) {
        if (magnitude(x) > 0x7F800000u) return 0.0f;
        return __uint_as_float(min(magnitude(x), LARGEST) | (__float_as_uint(x) & 0x80000000u));
    }

    // The 8 bits of a tamed value, rounded up with the probability that what is discarded says; 19 bits are random.
    static __device__ __forceinline__ u32 encode(float x, u32 scale, u32 random) {
        float value = SIGNED ? __uint_as_float(magnitude(x)) : x;
        float small = __fmul_rn(__fadd_rn(value, knee(scale)), 0.5f);
        if (small > value) value = small;
        u32 code = __float_as_uint(value) - base(scale) + random;
        // Without a sign the moment is what steps are divided by: never zero.
        code = SIGNED ? code | (__float_as_uint(x) >> 5 & 1u << 26) : max(code, 1u << 19);
        return code >> 19 & 0xFFu;
    }
};

// Two neighbouring 16-bit elements, zero beyond n, as a word; `word`: the address of every even one is a multiple of 4.
__device__ __forceinline__ u32 load_pair(const void *from, i64 i, i64 n, bool word) {
    const u16 *at = (const u16 *)from + i;
    if (word && i + 1 < n) return *(const u32 *)at;
    return (i < n ? at[0] : 0u) | (i + 1 < n ? (u32)at[1] << 16 : 0u);
}

__device__ __forceinline__ void store_pair(void *to, i64 i, i64 n, bool word, u32 pair) {
    u16 *at = (u16 *)to + i;
    if (word && i + 1 < n) {
        *(u32 *)at = pair;
        return;
    }
    if (i < n) at[0] = (u16)pair;
    if (i + 1 < n) at[1] = (u16)(pair >> 16);
}

__device__ __forceinline__ void load_gradient_pair(const void *from, int dtype, i64 i, i64 n, bool vector, u32 g[2]) {
    if (dtype != F32) {
        u32 pair = load_pair(from, i, n, vector);
        g[0] = widened(pair & 0xFFFFu, dtype), g[1] = widened(pair >> 16, dtype);
        return;
    }
    const u32 *at = (const u32 *)from + i;
    if (vector && i + 1 < n) {
        uint2 pair = *(const uint2 *)at;
        g[0] = pair.x, g[1] = pair.y;
        return;
    }
    g[0] = i < n ? at[0] : 0u, g[1] = i + 1 < n ? at[1] : 0u;
}

// The largest of a value over the threads of a block.
__device__ __forceinline__ u32 largest_of_block(u32 x) {
#pragma unroll
    for (int lanes = BLOCK_THREADS / 2; lanes > 0; lanes /= 2) x = max(x, __shfl_xor_sync(ALL_LANES, x, lanes));
    return x;
}

// Thread l of the 16 that share a block has parameters 2l, 2l + 1, 32 + 2l and 33 + 2l: bytes 4l .. 4l + 4 of remainders and
// codes. The last block is whole but for its weights and gradients, which count as zero where they do not exist.
extern "C" __global__ void __launch_bounds__(256)
adam_compact(const void *gradient, int gradient_dtype, void *weight, void *rest, void *m, void *v, i64 n, STEP_PARAMETERS) {
    const Step step = STEP;
    bool pairs = aligned(gradient, gradient_dtype == F32 ? 8 : 4), words = aligned(weight, 4), rest_words = aligned(rest, 4);
    bool even = aligned(m, 2) && aligned(v, 2), rest_even = aligned(rest, 2);
    int lane = threadIdx.x % BLOCK_THREADS;
    i64 blocks = (n + BLOCK - 1) / BLOCK, stride = (i64)gridDim.x * blockDim.x / BLOCK_THREADS;
    i64 start = ((i64)blockIdx.x * blockDim.x + threadIdx.x) / BLOCK_THREADS;
    // A warp has two blocks, and goes on while it has one.
    for (i64 block = start; block / 2 * 2 < blocks; block += stride) {
        bool exists = block < blocks;
        i64 first = exists ? block * BLOCK : n, at[2] = {first + 2 * lane, first + 2 * lane + BLOCK / 2};
        u8 *rest_at = (u8 *)rest + block * BLOCK + 4 * lane;
        u8 *m_block = (u8 *)m + block * BLOCK_BYTES, *v_block = (u8 *)v + block * BLOCK_BYTES;
        u32 g[4], high[2], remainders = 0, m_codes = 0, v_codes = 0, m_scale = SMALLEST_SCALE, v_scale = SMALLEST_SCALE;
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            load_gradient_pair(gradient, gradient_dtype, at[pair], n, pairs, g + 2 * pair);
            high[pair] = load_pair(weight, at[pair], n, words);
        }
        if (exists) {
            remainders = load_bytes4(rest_at, rest_even, rest_words);
            m_codes = load_bytes4(m_block + 4 * lane, even, false);
            v_codes = load_bytes4(v_block + 4 * lane, even, false);
            m_scale = load_scale(m_block + BLOCK), v_scale = load_scale(v_block + BLOCK);
        }
        u32 noise[2], p[4], m_largest = 0, v_largest = 0;
        float m_new[4], v_new[4];
#pragma unroll
        for (int pair = 0; pair < 2; pair++)
            noise[pair] = noise_of_pair(step.seed, g[2 * pair], g[2 * pair + 1], high[pair] + (remainders << 8 * pair));
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 weight_bits = j % 2 == 0 ? high[j / 2] << 16 : high[j / 2] & 0xFFFF0000u, shift = 24 - 8 * j;
            u32 remainder = (u32)((int)(remainders << shift) >> 16) & ~0xFFu;
            float master = __uint_as_float(weight_bits + remainder);
            m_new[j] = Codes<true>::decode(m_codes << shift, m_scale);
            v_new[j] = Codes<false>::decode(v_codes << shift, v_scale);
            update(step, __uint_as_float(g[j]), master, m_new[j], v_new[j]);
            m_new[j] = Codes<true>::tamed(m_new[j]), v_new[j] = Codes<false>::tamed(v_new[j]);
            m_largest = max(m_largest, magnitude(m_new[j])), v_largest = max(v_largest, magnitude(v_new[j]));
            p[j] = canonical(master);
        }
        m_scale = scale_for(largest_of_block(m_largest)), v_scale = scale_for(largest_of_block(v_largest));
        if (!exists) continue;
        remainders = m_codes = v_codes = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            u32 word = noise[j / 2];
            u32 random8 = j % 2 == 0 ? word >> 8 & 0xFFu : word >> 24, random19 = j % 2 == 0 ? word << 3 & 0x7FFFFu : word >> 13;
            p[j] += random8;
            remainders |= (p[j] >> 8 & 0xFFu) << 8 * j;
            m_codes |= Codes<true>::encode(m_new[j], m_scale, random19) << 8 * j;
            v_codes |= Codes<false>::encode(v_new[j], v_scale, random19) << 8 * j;
        }
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            u32 odd = (p[2 * pair + 1] + 0x8000u) & 0xFFFF0000u;
            store_pair(weight, at[pair], n, words, rounded_bf16(p[2 * pair]) | odd);
        }
        store_bytes4(rest_at, rest_even, rest_words, remainders);
        store_bytes4(m_block + 4 * lane, even, false, m_codes);
        store_bytes4(v_block + 4 * lane, even, false, v_codes);
        if (lane == 0) {
            u32 m_bits = m_scale << 7, v_bits = v_scale << 7;
            m_block[BLOCK] = (u8)m_bits, m_block[BLOCK + 1] = (u8)(m_bits >> 8);
            v_block[BLOCK] = (u8)v_bits, v_block[BLOCK + 1] = (u8)(v_bits >> 8);
        }
    }
}
