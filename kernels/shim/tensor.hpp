// Tensor-core instructions of a warp for the shim, by the fragment layouts of the PTX manual, and asynchronous copies.
//
// A .cu file calls these under `#ifdef TERRACE_SHIM` where it has inline PTX otherwise:
//
//   mma_m16n8k16<F16>(d, a, b, c)   mma.sync.aligned.m16n8k16.row.col.f32.{bf16|f16}.{bf16|f16}.f32
//   ldmatrix<COUNT, TRANS>(r, row)  ldmatrix.sync.aligned.m8n8.x{1|2|4}[.trans].shared.b16
//   copy_async(to, from, bytes, valid), copy_commit(), copy_wait(groups)   cp.async, .commit_group, .wait_group
//
// Sums of mma are taken in f32 with k ascending; hardware has an order and a width of its own. A copy happens at the
// wait that covers it, so that reading its destination too early shows.
#pragma once

namespace terrace_shim {

inline float widen_bf16(uint16_t bits) { return terrace_shim_bits<float>(uint32_t(bits) << 16); }

inline float widen_f16(uint16_t bits) {
    uint32_t sign = uint32_t(bits >> 15) << 31, exponent = bits >> 10 & 31, fraction = bits & 1023;
    if (exponent == 0) return (sign ? -1.0f : 1.0f) * std::ldexp(float(fraction), -24);
    if (exponent == 31) return terrace_shim_bits<float>(sign | 0x7F800000u | fraction << 13);
    return terrace_shim_bits<float>(sign | (exponent + 112) << 23 | fraction << 13);
}

struct MmaIn { const uint32_t *a, *b; const float *c; };

template <bool F16> float widen_half(const uint32_t *registers, int index) {
    uint16_t bits = uint16_t(registers[index / 2] >> (16 * (index % 2)));
    return F16 ? widen_f16(bits) : widen_bf16(bits);
}

template <bool F16> void mma_lanes(unsigned, const void *const in[32], void *const out[32]) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++) {
        const MmaIn &from = *static_cast<const MmaIn *>(in[lane]);
        int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 8; i++)
            a[group + 8 * (i / 2 % 2)][pair + i % 2 + 8 * (i / 4)] = widen_half<F16>(from.a, i);
        for (int i = 0; i < 4; i++) b[pair + i % 2 + 8 * (i / 2)][group] = widen_half<F16>(from.b, i);
    }
    for (int lane = 0; lane < 32; lane++) {
        const MmaIn &from = *static_cast<const MmaIn *>(in[lane]);
        int group = lane / 4, pair = lane % 4 * 2;
        for (int i = 0; i < 4; i++) {
            int row = group + 8 * (i / 2), col = pair + i % 2;
            float sum = from.c[i];
            for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][col];
            static_cast<float *>(out[lane])[i] = sum;
        }
    }
}

// d = a·b + c: a [16, 16] in four registers a lane, b [16, 8] in two, c and d [16, 8] in four floats. d may be c.
template <bool F16>
void mma_m16n8k16(float d[4], const uint32_t a[4], const uint32_t b[2], const float c[4],
                  int line = __builtin_LINE()) {
    MmaIn in{a, b, c};
    float sums[4];
    collective(mma_lanes<F16>, 0xFFFFFFFFu, &in, sums, line);
    std::memcpy(d, sums, sizeof sums);
}

template <int COUNT, bool TRANS> void ldmatrix_lanes(unsigned, const void *const in[32], void *const out[32]) {
    for (int matrix = 0; matrix < COUNT; matrix++) {
        uint16_t rows[8][8];
        // Lane 8·matrix + i gives the address of row i: 16 bytes.
        for (int i = 0; i < 8; i++) std::memcpy(rows[i], in[8 * matrix + i], 16);
        for (int lane = 0; lane < 32; lane++) {
            int row = lane / 4, col = lane % 4 * 2;
            uint32_t low = TRANS ? rows[col][row] : rows[row][col];
            uint32_t high = TRANS ? rows[col + 1][row] : rows[row][col + 1];
            static_cast<uint32_t *>(out[lane])[matrix] = high << 16 | low;
        }
    }
}

// COUNT matrices of 8 × 8 16-bit elements, one register of each a lane.
template <int COUNT, bool TRANS> void ldmatrix(uint32_t *registers, const void *row, int line = __builtin_LINE()) {
    if (reinterpret_cast<uintptr_t>(row) % 16 != 0) fail("ldmatrix from an address that is no multiple of 16", current);
    uint32_t out[COUNT];
    collective(ldmatrix_lanes<COUNT, TRANS>, 0xFFFFFFFFu, row, out, line);
    std::memcpy(registers, out, sizeof out);
}

// Copies `valid` of `bytes` bytes and fills the rest with zeros.
inline void copy_async(void *to, const void *from, int bytes, int valid, int line = __builtin_LINE()) {
    current->line = line;
    if (reinterpret_cast<uintptr_t>(to) % unsigned(bytes) != 0 || reinterpret_cast<uintptr_t>(from) % unsigned(bytes) != 0)
        fail("an asynchronous copy that is not aligned to its size", current);
    std::memset(to, 0xFF, size_t(bytes));
    current->copies.push_back({to, from, bytes, valid, current->groups});
}

inline void copy_commit() { current->groups += 1; }

// Waits until at most `groups` of the committed groups are not done.
inline void copy_wait(unsigned groups) {
    std::vector<Copy> &copies = current->copies;
    size_t done = 0;
    while (done < copies.size() && copies[done].group + groups < current->groups) {
        const Copy &copy = copies[done++];
        std::memset(copy.to, 0, size_t(copy.bytes));
        std::memcpy(copy.to, copy.from, size_t(copy.valid));
    }
    copies.erase(copies.begin(), copies.begin() + long(done));
}

} // namespace terrace_shim
