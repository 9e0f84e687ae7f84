// Kernels as functions of the host: what the mock driver runs when a kernel is launched.
#pragma once
#include <cstddef>

struct terrace_kernel {
    const char *name;
    // Number of parameters, and the size of each in bytes; the driver copies the arguments by these.
    int parameters;
    const unsigned *parameter_bytes;
    // Runs the whole grid. `args` are addresses of the arguments' values, as in cuLaunchKernel. Called from the thread
    // of the launch's stream; kernels of several streams run at once.
    void (*run)(void **args, const unsigned grid[3], const unsigned block[3], size_t shared_bytes);
};

// The kernel of this name; null when unknown.
extern "C" __attribute__((visibility("default"))) const terrace_kernel *terrace_shim_find(const char *name);
