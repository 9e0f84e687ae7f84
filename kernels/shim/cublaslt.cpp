// libcublasLt.so.13 without a card: products as plain loops over column-major matrices, so that what kernels/src/cuda asks
// the library for can be compared with the reference. It has the functions that are called there, checks the sizes of
// attributes as the library does, waits for the stream and computes at the call.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include <dlfcn.h>

#include "terrace_shim.hpp"

TERRACE_SHIM_BEGIN
#include "../src/cuda/common.cuh"
TERRACE_SHIM_END

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Status { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum Type { R_32F = 0, R_16F = 2, R_16BF = 14 };
constexpr int COMPUTE_32F = 68;

struct Description {
    int32_t transposed[2];
    uint32_t epilogue;
    const void *bias;
};
constexpr uint32_t EPILOGUE_DEFAULT = 1, EPILOGUE_BIAS = 4;
struct Layout { int type; uint64_t rows, columns; int64_t stride; };
struct Preferences {
    uint64_t workspace_bytes;
    uint32_t reductions;
    // Of A, B, C and D.
    uint32_t alignments[4];
};

// As the kernels call the types; they widen and round for this file, too.
int code(int type) { return type == R_32F ? F32 : type == R_16BF ? BF16 : F16; }

struct Sizes { uint64_t m, n, k; };

// Sizes of D [m, n] = op(A) [m, k] · op(B) [k, n]; whether they agree.
bool sizes(const Description &description, const Layout &a, const Layout &b, const Layout &d, Sizes &out) {
    uint64_t m = description.transposed[0] ? a.columns : a.rows, k = description.transposed[0] ? a.rows : a.columns;
    uint64_t k_b = description.transposed[1] ? b.columns : b.rows, n = description.transposed[1] ? b.rows : b.columns;
    out = {m, n, k};
    return k == k_b && d.rows == m && d.columns == n;
}

bool dense(const Layout &layout) { return layout.stride == int64_t(layout.rows); }

} // namespace

EXPORT size_t cublasLtGetVersion() { return 130000; }

// TERRACE_SHIM_CUBLASLT_CREATE: the status that this gives instead, as on a driver that is older than the library.
EXPORT int cublasLtCreate(void **handle) {
    if (const char *status = std::getenv("TERRACE_SHIM_CUBLASLT_CREATE")) return std::atoi(status);
    *handle = new int;
    return SUCCESS;
}

EXPORT int cublasLtDestroy(void *handle) {
    delete static_cast<int *>(handle);
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescCreate(Description **description, int compute, int scale) {
    if (compute != COMPUTE_32F || scale != R_32F) return NOT_SUPPORTED;
    *description = new Description{{0, 0}, EPILOGUE_DEFAULT, nullptr};
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescDestroy(Description *description) {
    delete description;
    return SUCCESS;
}

EXPORT int cublasLtMatmulDescSetAttribute(Description *description, int attribute, const void *value, size_t bytes) {
    // CUBLASLT_MATMUL_DESC_TRANSA and _TRANSB, _EPILOGUE and _BIAS_POINTER.
    void *to = nullptr;
    if ((attribute == 3 || attribute == 4) && bytes == 4) to = &description->transposed[attribute - 3];
    if (attribute == 7 && bytes == 4) to = &description->epilogue;
    if (attribute == 8 && bytes == 8) to = &description->bias;
    if (!to) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutCreate(Layout **layout, int type, uint64_t rows, uint64_t columns, int64_t stride) {
    *layout = new Layout{type, rows, columns, stride};
    return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutDestroy(Layout *layout) {
    delete layout;
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceCreate(Preferences **preferences) {
    *preferences = new Preferences{0, 0xFFFFFFFFu, {256, 256, 256, 256}};
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceDestroy(Preferences *preferences) {
    delete preferences;
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceSetAttribute(Preferences *preferences, int attribute, const void *value, size_t bytes) {
    void *to = nullptr;
    if (attribute == 1 && bytes == 8) to = &preferences->workspace_bytes;
    if (attribute == 3 && bytes == 4) to = &preferences->reductions;
    if (attribute >= 5 && attribute <= 8 && bytes == 4) to = &preferences->alignments[attribute - 5];
    if (!to) return INVALID_VALUE;
    std::memcpy(to, value, bytes);
    return SUCCESS;
}

// The algorithm is the alignments that it was promised.
EXPORT int cublasLtMatmulAlgoGetHeuristic(void *, const Description *description, const Layout *a, const Layout *b,
                                          const Layout *c, const Layout *d, const Preferences *preferences, int room,
                                          void *results, int *count) {
    Sizes found;
    *count = 0;
    if (room < 1 || c != d || !sizes(*description, *a, *b, *d, found)) return INVALID_VALUE;
    if (description->epilogue != EPILOGUE_DEFAULT && (description->epilogue != EPILOGUE_BIAS || !description->bias))
        return INVALID_VALUE;
    if (a->type != b->type || (d->type != a->type && d->type != R_32F)) return NOT_SUPPORTED;
    std::memcpy(results, preferences->alignments, sizeof preferences->alignments);
    *count = 1;
    return SUCCESS;
}

EXPORT int cublasLtMatmul(void *, const Description *description, const float *alpha, const void *a, const Layout *a_layout,
                          const void *b, const Layout *b_layout, const float *beta, const void *c, const Layout *c_layout,
                          void *d, const Layout *d_layout, const uint32_t *alignments, void *, size_t, void *stream) {
    Sizes of;
    if (!sizes(*description, *a_layout, *b_layout, *d_layout, of) || c_layout != d_layout) return INVALID_VALUE;
    if (!dense(*a_layout) || !dense(*b_layout) || !dense(*d_layout)) return INVALID_VALUE;
    const void *operands[4] = {a, b, c, d};
    for (int i = 0; i < 4; i++)
        if (reinterpret_cast<uintptr_t>(operands[i]) % alignments[i] != 0) return INVALID_VALUE;
    const void *bias = description->epilogue == EPILOGUE_BIAS ? description->bias : nullptr;
    // The driver is loaded already, but its names are its own.
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    auto wait = driver ? reinterpret_cast<int (*)(void *)>(dlsym(driver, "cuStreamSynchronize")) : nullptr;
    if (!wait || wait(stream) != 0) return INVALID_VALUE;
    for (uint64_t column = 0; column < of.n; column++)
        for (uint64_t row = 0; row < of.m; row++) {
            float sum = 0;
            for (uint64_t k = 0; k < of.k; k++) {
                uint64_t at_a = description->transposed[0] ? k + row * of.k : row + k * of.m;
                uint64_t at_b = description->transposed[1] ? column + k * of.n : k + column * of.k;
                sum += load(a, code(a_layout->type), i64(at_a)) * load(b, code(b_layout->type), i64(at_b));
            }
            i64 at = i64(row + column * of.m);
            // What is there is not read when it does not count: it may be NaN.
            float old = *beta != 0 ? *beta * load(c, code(c_layout->type), at) : 0.0f;
            float result = *alpha * sum + old;
            // A bias has an element for every row, of the type of D.
            if (bias) result += load(bias, code(d_layout->type), i64(row));
            store(d, code(d_layout->type), at, result);
        }
    return SUCCESS;
}
