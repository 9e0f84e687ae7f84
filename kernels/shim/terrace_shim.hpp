// Runs CUDA kernels on the CPU: compiled in front of an unmodified .cu file, by g++ instead of NVRTC.
//
// Why: kernels are to be tested for what they compute, and for missing barriers, on machines without a GPU.
//
// How: every thread of a block is a fiber with a stack of its own; the fibers of a block share one thread of the
// operating system and run one at a time, each until it reaches a barrier, a warp operation or its end. Blocks run one
// after the other. `__shared__` variables are thread_local, so launches may run in several threads at once.
//
//   __shared__ float x[N];                                        static shared memory: keeps what the last block left
//   extern __shared__ __align__(16) unsigned char dynamic_shared[];  dynamic: exactly this (common.cuh has it); 0xFF (NaN)
//                                                                 in every new block; a write beyond its end aborts
//   __syncthreads()      all threads that have not returned; aborts if they wait at different lines
//   __syncwarp, __shfl_*_sync, __ballot_sync …   all lanes of the mask must come, or the program aborts
//   terrace_shim::collective   any other operation of a whole warp; tensor.hpp has mma and ldmatrix
//
// `cargo xtask cuda-shim` wraps every .cu file in an unnamed namespace (files do not see each other's functions), finds
// its kernels (`extern "C" __global__ void NAME(`) and links them all into one library with this interface:
//
//   const terrace_kernel *terrace_shim_find(const char *name);      null when there is no such kernel
//   void terrace_shim_order(const char *seed);                      for this thread instead of the variable below
//
// `run` executes a launch before it returns. `args[i]` points to parameter i, of `parameter_bytes[i]` bytes.
//
// TERRACE_SHIM_ORDER=SEED runs the blocks of a launch, and between two barriers the threads of a block, in an order
// drawn from the seed (a new one at every barrier); without it in ascending order. In half of the draws warps go one after
// the other, each past its own operations as far as the barrier. A result that depends on the seed is a race.
//
// What it does not show: races between instructions that are not separated by a barrier in any order of whole runs,
// memory ordering between blocks, asynchronous copies in flight, the rounding of approximate instructions (`__expf` is
// the exact expf), and anything about speed.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>

#define TERRACE_SHIM 1

// ---- types and variables of the language ----------------------------------------------------------------------------

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) double2 { double x, y; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }

// One kernel, as `terrace_shim_find` gives it.
struct terrace_kernel {
    const char *name;
    int parameters;
    const unsigned *parameter_bytes;
    void (*run)(void **args, const unsigned grid[3], const unsigned block[3], size_t shared_bytes);
};

namespace terrace_shim {

constexpr size_t SHARED_BYTES_MAX = 227 * 1024;
constexpr size_t CANARY_BYTES = 1024;
constexpr unsigned THREADS_MAX = 1024;
constexpr size_t STACK_BYTES = 256 * 1024;

enum class State : unsigned char { Ready, Barrier, Warp, Done };

using Compute = void (*)(unsigned mask, const void *const in[32], void *const out[32]);

// Where a fiber, or the loop that runs them, goes on.
#if defined(__x86_64__)
// swapcontext makes two system calls, and a block takes thousands of switches.
struct Context { void *stack; };
#else
using Context = ucontext_t;
#endif

// An asynchronous copy that was started and not yet waited for.
struct Copy { void *to; const void *from; int bytes, valid; unsigned group; };

struct Fiber {
    uint3 thread;
    unsigned index;
    State state;
    int line;
    // The warp operation it waits for.
    Compute compute;
    unsigned mask;
    const void *in;
    void *out;
    std::vector<Copy> copies;
    unsigned groups;
    Context context;
};

// What a thread of the operating system needs to run blocks.
struct Worker {
    Fiber *fibers;
    unsigned char *stacks;
    unsigned threads;
    unsigned done, waiting;
    int votes;
    uint3 block;
    dim3 block_dim, grid_dim;
    Context scheduler;
    void (*call)(void **);
    void **args;
    uint64_t random;
    uint64_t launches;
    // Lanes that wait in each warp.
    unsigned char lanes_waiting[THREADS_MAX / 32];
};

__constinit inline thread_local Fiber *current = nullptr;
__constinit inline thread_local Worker *worker = nullptr;

// What this thread uses instead of TERRACE_SHIM_ORDER; it must live as long.
__constinit inline thread_local const char *order = nullptr;

[[noreturn]] inline void fail(const char *what, const Fiber *at) {
    std::fprintf(stderr, "terrace_shim: %s (block %u,%u,%u thread %u,%u,%u line %d)\n", what, worker->block.x,
                 worker->block.y, worker->block.z, at->thread.x, at->thread.y, at->thread.z, at->line);
    std::abort();
}

inline void fiber_main();

#if defined(__x86_64__)

__attribute__((naked, noinline, used)) inline void switch_stacks(void **, void *) {
    __asm__("push %rbp\n push %rbx\n push %r12\n push %r13\n push %r14\n push %r15\n"
            "mov %rsp, (%rdi)\n mov %rsi, %rsp\n"
            "pop %r15\n pop %r14\n pop %r13\n pop %r12\n pop %rbx\n pop %rbp\n ret");
}

inline void switch_context(Context &from, Context &to) { switch_stacks(&from.stack, to.stack); }

inline void prepare(Context &context, unsigned char *stack, size_t bytes) {
    // Six registers, then the address that the switch returns to; a function starts 8 bytes off a multiple of 16.
    void **top = reinterpret_cast<void **>(stack + bytes) - 8;
    std::memset(top, 0, 64);
    top[6] = reinterpret_cast<void *>(fiber_main);
    context.stack = top;
}

#else

inline void switch_context(Context &from, Context &to) { swapcontext(&from, &to); }

inline void prepare(Context &context, unsigned char *stack, size_t bytes) {
    getcontext(&context);
    context.uc_stack.ss_sp = stack;
    context.uc_stack.ss_size = bytes;
    context.uc_link = nullptr;
    makecontext(&context, fiber_main, 0);
}

#endif

inline void yield() { switch_context(current->context, worker->scheduler); }

inline void fiber_main() {
    for (;;) {
        worker->call(worker->args);
        current->state = State::Done;
        worker->done += 1;
        yield();
    }
}

inline void resume(Fiber *fiber) {
    current = fiber;
    switch_context(worker->scheduler, fiber->context);
    current = nullptr;
}

// Gives the memory back when its thread of the operating system ends.
struct WorkerHome {
    Worker here{};
    std::vector<unsigned> order;
    ~WorkerHome() {
        if (here.stacks) munmap(here.stacks, THREADS_MAX * STACK_BYTES);
        delete[] here.fibers;
        worker = nullptr;
    }
};

inline WorkerHome &home() {
    static thread_local WorkerHome home;
    if (!home.here.fibers) {
        void *stacks = mmap(nullptr, THREADS_MAX * STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            std::perror("terrace_shim: stacks");
            std::abort();
        }
        home.here.stacks = static_cast<unsigned char *>(stacks);
        home.here.fibers = new Fiber[THREADS_MAX]();
        for (unsigned i = 0; i < THREADS_MAX; i++) {
            Fiber &fiber = home.here.fibers[i];
            unsigned char *stack = home.here.stacks + i * STACK_BYTES;
            // A page that nobody may touch catches a stack that grows too far.
            mprotect(stack, 4096, PROT_NONE);
            // Not all at the same place of a page, or their tops would share the same few cache lines.
            prepare(fiber.context, stack, STACK_BYTES - i % 61 * 320);
            fiber.index = i;
        }
    }
    worker = &home.here;
    return home;
}

// SplitMix64.
inline uint64_t draw(uint64_t &state) {
    uint64_t z = state += 0x9E3779B97F4A7C15u;
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

template <typename T> void shuffle(std::vector<T> &order, uint64_t &state) {
    for (size_t i = order.size(); i > 1; i--) std::swap(order[i - 1], order[draw(state) % i]);
}

// Every warp operation: when the last lane of `mask` has come, `compute` sees all lanes' `in` and fills their `out`.
__attribute__((noinline)) inline void collective(Compute compute, unsigned mask, const void *in, void *out, int line) {
    Worker &here = *worker;
    Fiber *self = current;
    unsigned first = self->index & ~31u, lane = self->index & 31u;
    self->line = line;
    if (!(mask >> lane & 1)) fail("a warp operation whose mask leaves out the calling lane", self);
    self->compute = compute;
    self->mask = mask;
    self->in = in;
    self->out = out;
    self->state = State::Warp;
    unsigned char &lanes_waiting = here.lanes_waiting[self->index / 32];
    lanes_waiting += 1;
    const void *ins[32];
    void *outs[32];
    bool all = lanes_waiting >= __builtin_popcount(mask);
    for (unsigned i = 0; all && i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        Fiber &other = here.fibers[first + i];
        all = first + i < here.threads && other.state == State::Warp;
        if (!all) break;
        if (other.compute != compute || other.mask != mask) fail("lanes of a mask are at different operations", self);
        ins[i] = other.in;
        outs[i] = other.out;
    }
    if (!all) {
        yield();
        return;
    }
    compute(mask, ins, outs);
    lanes_waiting -= __builtin_popcount(mask);
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) here.fibers[first + i].state = State::Ready;
}

inline void barrier(int line) {
    current->state = State::Barrier;
    current->line = line;
    worker->waiting += 1;
    yield();
}

inline void release_barrier(Worker &here) {
    const Fiber *first = nullptr;
    for (unsigned i = 0; i < here.threads; i++) {
        Fiber &fiber = here.fibers[i];
        if (fiber.state != State::Barrier) continue;
        if (!first) first = &fiber;
        if (fiber.line != first->line) fail("threads of a block wait at different barriers", &fiber);
        fiber.state = State::Ready;
    }
    here.waiting = 0;
}

// The warp that begins at a thread, until its lanes wait for other warps.
inline void run_ahead(Worker &here, unsigned first) {
    for (bool progress = true; progress;) {
        progress = false;
        for (unsigned i = first; i < std::min(first + 32, here.threads); i++) {
            if (here.fibers[i].state != State::Ready) continue;
            progress = true;
            resume(&here.fibers[i]);
        }
    }
}

inline void run_block(WorkerHome &home, bool random) {
    Worker &here = home.here;
    here.done = here.waiting = 0;
    here.votes = 0;
    std::memset(here.lanes_waiting, 0, sizeof here.lanes_waiting);
    for (unsigned i = 0; i < here.threads; i++) {
        Fiber &fiber = here.fibers[i];
        fiber.state = State::Ready;
        fiber.copies.clear();
        fiber.groups = 0;
        fiber.thread = {i % here.block_dim.x, i / here.block_dim.x % here.block_dim.y,
                        i / (here.block_dim.x * here.block_dim.y)};
    }
    while (here.done < here.threads) {
        if (random) shuffle(home.order, here.random);
        bool ahead = random && draw(here.random) % 2 == 0, progress = false;
        for (unsigned i : home.order) {
            if (here.fibers[i].state != State::Ready) continue;
            progress = true;
            resume(&here.fibers[i]);
            if (ahead) run_ahead(here, i & ~31u);
        }
        if (here.waiting > 0 && here.waiting + here.done == here.threads) {
            release_barrier(here);
        } else if (!progress) {
            for (unsigned i = 0; i < here.threads; i++)
                if (here.fibers[i].state == State::Warp)
                    fail("a warp waits for lanes that have returned, do not exist or are elsewhere", &here.fibers[i]);
        }
    }
}

inline void run_grid(void (*call)(void **), unsigned char *dynamic_shared, void **args, const unsigned grid[3],
                     const unsigned block[3], size_t shared_bytes) {
    WorkerHome &home = terrace_shim::home();
    Worker &here = home.here;
    here.threads = block[0] * block[1] * block[2];
    here.call = call;
    here.args = args;
    here.block_dim = {block[0], block[1], block[2]};
    here.grid_dim = {grid[0], grid[1], grid[2]};
    here.launches += 1;
    if (here.threads == 0 || here.threads > THREADS_MAX || shared_bytes > SHARED_BYTES_MAX || grid[1] > 65535 ||
        grid[2] > 65535 || grid[0] == 0 || grid[1] == 0 || grid[2] == 0) {
        std::fprintf(stderr, "terrace_shim: no such launch: grid %u,%u,%u block %u,%u,%u shared %zu\n", grid[0],
                     grid[1], grid[2], block[0], block[1], block[2], shared_bytes);
        std::abort();
    }
    const char *seed = order ? order : std::getenv("TERRACE_SHIM_ORDER");
    bool random = seed && *seed;
    if (random) here.random = std::strtoull(seed, nullptr, 10) * 0x9E3779B97F4A7C15u + here.launches;
    home.order.resize(here.threads);
    for (unsigned i = 0; i < here.threads; i++) home.order[i] = i;
    std::vector<uint64_t> blocks(uint64_t(grid[0]) * grid[1] * grid[2]);
    for (size_t i = 0; i < blocks.size(); i++) blocks[i] = i;
    if (random) shuffle(blocks, here.random);
    for (uint64_t b : blocks) {
        here.block = {unsigned(b % grid[0]), unsigned(b / grid[0] % grid[1]), unsigned(b / grid[0] / grid[1])};
        std::memset(dynamic_shared, 0xFF, shared_bytes + CANARY_BYTES);
        run_block(home, random);
        for (size_t i = 0; i < CANARY_BYTES; i++)
            if (dynamic_shared[shared_bytes + i] != 0xFF) fail("a write beyond the dynamic shared memory", &here.fibers[0]);
    }
}

// What a launch needs to know of a kernel, from the type of its function.
template <auto Kernel, unsigned char *(*DynamicShared)()> struct Entry;
template <typename... P, void (*Kernel)(P...), unsigned char *(*DynamicShared)()> struct Entry<Kernel, DynamicShared> {
    static constexpr int parameters = sizeof...(P);
    static constexpr unsigned parameter_bytes[sizeof...(P) + 1] = {unsigned(sizeof(P))..., 0};

    template <size_t... I> static void unpack(void **args, std::index_sequence<I...>) {
        Kernel(*static_cast<std::remove_const_t<P> *>(args[I])...);
    }
    static void call(void **args) { unpack(args, std::index_sequence_for<P...>()); }
    static void run(void **args, const unsigned grid[3], const unsigned block[3], size_t shared_bytes) {
        run_grid(call, DynamicShared(), args, grid, block, shared_bytes);
    }
};

// ---- warp operations ------------------------------------------------------------------------------------------------

template <typename T> struct Shuffle { T value; unsigned source; };

template <typename T> void shuffle_lanes(unsigned mask, const void *const in[32], void *const out[32]) {
    for (unsigned i = 0; i < 32; i++) {
        if (!(mask >> i & 1)) continue;
        unsigned source = static_cast<const Shuffle<T> *>(in[i])->source;
        // Reading a lane that does not take part is undefined: make it visible.
        if (mask >> source & 1) {
            *static_cast<T *>(out[i]) = static_cast<const Shuffle<T> *>(in[source])->value;
        } else {
            std::memset(out[i], 0xFF, sizeof(T));
        }
    }
}

template <typename T> T shuffle_from(unsigned mask, T value, unsigned source, int line) {
    Shuffle<T> in{value, source & 31};
    T out;
    collective(shuffle_lanes<T>, mask, &in, &out, line);
    return out;
}

inline unsigned lane() { return current->index & 31; }

inline void no_exchange(unsigned, const void *const *, void *const *) {}

inline void ballot_lanes(unsigned mask, const void *const in[32], void *const out[32]) {
    unsigned votes = 0;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) votes |= unsigned(*static_cast<const bool *>(in[i])) << i;
    for (unsigned i = 0; i < 32; i++)
        if (mask >> i & 1) *static_cast<unsigned *>(out[i]) = votes;
}

} // namespace terrace_shim

// Opens the namespace of one .cu file.
#define TERRACE_SHIM_BEGIN                                                                                             \
    namespace {                                                                                                        \
    alignas(128) thread_local unsigned char                                                                            \
        dynamic_shared[terrace_shim::SHARED_BYTES_MAX + terrace_shim::CANARY_BYTES];                                   \
    unsigned char *terrace_shim_dynamic() { return dynamic_shared; }
#define TERRACE_SHIM_END }
#define TERRACE_SHIM_KERNEL(NAME)                                                                                      \
    {#NAME, terrace_shim::Entry<&NAME, &terrace_shim_dynamic>::parameters,                                             \
     terrace_shim::Entry<&NAME, &terrace_shim_dynamic>::parameter_bytes,                                               \
     &terrace_shim::Entry<&NAME, &terrace_shim_dynamic>::run}

#define __global__
#define __device__
#define __host__
#define __constant__ static const
#define __shared__ thread_local
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)
#define threadIdx (terrace_shim::current->thread)
#define blockIdx (terrace_shim::worker->block)
#define blockDim (terrace_shim::worker->block_dim)
#define gridDim (terrace_shim::worker->grid_dim)
#define warpSize 32

inline void __syncthreads(int line = __builtin_LINE()) { terrace_shim::barrier(line); }
// The condition of any thread of the block, for all that have not returned.
inline int __syncthreads_or(int predicate, int line = __builtin_LINE()) {
    terrace_shim::Worker &here = *terrace_shim::worker;
    here.votes |= predicate != 0;
    terrace_shim::barrier(line);
    int any = here.votes;
    // Nobody votes again before everybody has read and the votes are gone.
    terrace_shim::barrier(line);
    here.votes = 0;
    terrace_shim::barrier(line);
    return any;
}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, int line = __builtin_LINE()) {
    terrace_shim::collective(terrace_shim::no_exchange, mask, nullptr, nullptr, line);
}
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, int line = __builtin_LINE()) {
    unsigned first = terrace_shim::lane() & ~unsigned(width - 1);
    return terrace_shim::shuffle_from(mask, value, first + unsigned(source & (width - 1)), line);
}
template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = 32, int line = __builtin_LINE()) {
    unsigned source = terrace_shim::lane() ^ unsigned(lanes), end = (terrace_shim::lane() | unsigned(width - 1)) + 1;
    return terrace_shim::shuffle_from(mask, value, source < end ? source : terrace_shim::lane(), line);
}
template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    unsigned source = terrace_shim::lane() + delta, end = (terrace_shim::lane() | unsigned(width - 1)) + 1;
    return terrace_shim::shuffle_from(mask, value, source < end ? source : terrace_shim::lane(), line);
}
template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, int line = __builtin_LINE()) {
    unsigned self = terrace_shim::lane(), first = self & ~unsigned(width - 1);
    return terrace_shim::shuffle_from(mask, value, self >= first + delta ? self - delta : self, line);
}
inline unsigned __ballot_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    bool in = predicate != 0;
    unsigned out;
    terrace_shim::collective(terrace_shim::ballot_lanes, mask, &in, &out, line);
    return out;
}
inline int __any_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, int line = __builtin_LINE()) {
    return __ballot_sync(mask, predicate, line) == mask;
}

// ---- atomics and fences: launches may run in several threads of the operating system --------------------------------

template <typename T> T atomicAdd(T *at, std::common_type_t<T> value) {
    T old, sum;
    __atomic_load(at, &old, __ATOMIC_SEQ_CST);
    do sum = old + value;
    while (!__atomic_compare_exchange(at, &old, &sum, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
template <typename T> T atomicMax(T *at, std::common_type_t<T> value) {
    T old, most;
    __atomic_load(at, &old, __ATOMIC_SEQ_CST);
    do most = old < value ? value : old;
    while (!__atomic_compare_exchange(at, &old, &most, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return old;
}
template <typename T> T atomicExch(T *at, std::common_type_t<T> value) {
    T old;
    __atomic_exchange(at, &value, &old, __ATOMIC_SEQ_CST);
    return old;
}
template <typename T> T atomicCAS(T *at, std::common_type_t<T> expected, std::common_type_t<T> value) {
    __atomic_compare_exchange(at, &expected, &value, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    return expected;
}
inline void __threadfence() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
inline void __threadfence_block() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

// ---- arithmetic -----------------------------------------------------------------------------------------------------

inline float __expf(float x) { return expf(x); }
inline float __exp2f(float x) { return exp2f(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline double __fma_rn(double x, double y, double z) { return fma(x, y, z); }
inline double __dmul_rn(double x, double y) { return x * y; }
inline double __dadd_rn(double x, double y) { return x + y; }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline double rsqrt(double x) { return 1.0 / sqrt(x); }
inline float __saturatef(float x) { return x < 0.0f || x != x ? 0.0f : x > 1.0f ? 1.0f : x; }

template <typename To, typename From> To terrace_shim_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "a change of type, not of size");
    To to;
    std::memcpy(&to, &value, sizeof to);
    return to;
}
inline unsigned __float_as_uint(float x) { return terrace_shim_bits<unsigned>(x); }
inline int __float_as_int(float x) { return terrace_shim_bits<int>(x); }
inline float __uint_as_float(unsigned x) { return terrace_shim_bits<float>(x); }
inline float __int_as_float(int x) { return terrace_shim_bits<float>(x); }
inline long long __double_as_longlong(double x) { return terrace_shim_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return terrace_shim_bits<double>(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x == 0 ? 32 : __builtin_clz(unsigned(x)); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return unsigned(((uint64_t(high) << 32) | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    uint64_t bytes = (uint64_t(y) << 32) | x;
    unsigned result = 0;
    for (unsigned i = 0; i < 4; i++) {
        unsigned select = selector >> (4 * i) & 0xF;
        unsigned byte = unsigned(bytes >> (8 * (select & 7))) & 0xFF;
        if (select & 8) byte = byte & 0x80 ? 0xFF : 0;
        result |= byte << (8 * i);
    }
    return result;
}
template <typename T> T __ldg(const T *at) { return *at; }
template <typename T> T __ldcs(const T *at) { return *at; }
template <typename T> void __stcs(T *at, T value) { *at = value; }
inline void __trap() { terrace_shim::fail("__trap", terrace_shim::current); }

template <typename A, typename B> constexpr std::common_type_t<A, B> min(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(b) < T(a) ? T(b) : T(a);
}
template <typename A, typename B> constexpr std::common_type_t<A, B> max(A a, B b) {
    using T = std::common_type_t<A, B>;
    return T(a) < T(b) ? T(b) : T(a);
}

#include "tensor.hpp"
