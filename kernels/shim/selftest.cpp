// The shim's own test: a program that ends with status 0 if right kernels give right results in every order of threads
// and wrong ones are caught. `cargo xtask cuda-mock` runs it.
#include "terrace_shim.hpp"

#include <csignal>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

TERRACE_SHIM_BEGIN
#include "selftest.cu"
TERRACE_SHIM_END

namespace {

int failures = 0;

void check(bool good, const char *what) {
    if (good) return;
    std::fprintf(stderr, "selftest: %s\n", what);
    failures += 1;
}

template <typename A, typename B> void launch(void (*run)(void **, const unsigned *, const unsigned *, size_t), A *x, B *out,
                                              unsigned threads, size_t shared_bytes) {
    void *args[] = {&x, &out};
    const unsigned grid[3] = {1, 1, 1}, block[3] = {threads, 1, 1};
    run(args, grid, block, shared_bytes);
}

// Whether the launch ends the process.
template <typename Launch> bool aborts(Launch launch) {
    std::fflush(nullptr);
    pid_t child = fork();
    if (child == 0) {
        if (!std::freopen("/dev/null", "w", stderr)) _exit(2);
        launch();
        _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

#define RUN(NAME) (terrace_shim::Entry<&NAME, &terrace_shim_dynamic>::run)

void right_kernels() {
    int x[128], out[128];
    for (int i = 0; i < 128; i++) x[i] = 7 * i % 31;
    launch(RUN(reverse), x, out, 128, 512);
    for (int i = 0; i < 128; i++) check(out[i] == x[127 - i], "a barrier orders writes before reads");
    launch(RUN(scan), x, out, 32, 0);
    for (int i = 0, sum = 0; i < 32; i++) check(out[i] == (sum += x[i]), "shuffles move values between lanes");
    launch(RUN(copy_and_wait), x, out, 32, 512);
    for (int i = 0; i < 128; i++) check(out[i] == x[i], "a copy that was waited for has arrived");
}

void one_product() {
    uint16_t a[16 * 16], b[16 * 8];
    // Small whole numbers are exact in bf16, and so are their sums.
    for (int i = 0; i < 256; i++) a[i] = uint16_t(terrace_shim_bits<uint32_t>(float(i * 5 % 13 - 6)) >> 16);
    for (int i = 0; i < 128; i++) b[i] = uint16_t(terrace_shim_bits<uint32_t>(float(i * 7 % 11 - 5)) >> 16);
    float d[16 * 8];
    uint16_t *pa = a, *pb = b;
    float *pd = d;
    void *args[] = {&pa, &pb, &pd};
    const unsigned grid[3] = {1, 1, 1}, block[3] = {32, 1, 1};
    RUN(one_mma)(args, grid, block, 1024);
    for (int row = 0; row < 16; row++)
        for (int column = 0; column < 8; column++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += float((row * 16 + k) * 5 % 13 - 6) * float((k * 8 + column) * 7 % 11 - 5);
            check(d[row * 8 + column] == sum, "ldmatrix and mma agree on where elements are");
        }
}

void wrong_kernels() {
    int x[128], out[128];
    for (int i = 0; i < 128; i++) x[i] = i;
    launch(RUN(no_barrier_wrong), x, out, 128, 512);
    auto stale = [&] {
        bool any = false;
        for (int i = 0; i < 128; i++) any |= out[i] != x[127 - i];
        return any;
    };
    check(stale(), "a missing barrier shows");
    // In half of the drawn orders.
    bool shows = *std::getenv("TERRACE_SHIM_ORDER") == 0;
    for (int i = 0; i < 20; i++) {
        launch(RUN(warp_barrier_wrong), x, out, 128, 512);
        shows |= stale();
    }
    check(shows, "a barrier of warps in place of the block's shows");
    launch(RUN(copy_without_wait_wrong), x, out, 32, 512);
    check(out[0] == -1, "a copy that was not waited for is not there");
    check(aborts([&] { launch(RUN(beyond_shared_wrong), x, out, 128, 512); }), "a write beyond shared memory is caught");
    check(aborts([&] { launch(RUN(two_barriers_wrong), x, out, 128, 0); }), "different barriers are caught");
    check(aborts([&] { launch(RUN(missing_lane_wrong), x, out, 32, 0); }), "a missing lane is caught");
    check(aborts([&] { launch(RUN(reverse), x, out, 2048, 8192); }), "too many threads are caught");
}

} // namespace

int main() {
    for (int seed = 0; seed < 20; seed++) {
        setenv("TERRACE_SHIM_ORDER", seed == 0 ? "" : std::to_string(seed).c_str(), 1);
        right_kernels();
        one_product();
        wrong_kernels();
    }
    std::fprintf(stderr, "selftest: %d failures\n", failures);
    return failures != 0;
}
