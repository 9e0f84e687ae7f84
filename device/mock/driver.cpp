// libcuda.so.1: the driver's functions that the backend calls, over machine.h. See README.md.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "faults.h"
#include "machine.h"
#include "shim.h"

using namespace mock;

namespace {

constexpr unsigned SHARED_BYTES_DEFAULT = 48 << 10;
constexpr unsigned SHARED_BYTES_MAX = 227 << 10;
constexpr unsigned BLOCK_THREADS_MAX = 1024;

struct Event {
    bool timed;
    std::shared_ptr<Point> point;
};

struct Module;

struct Function {
    Module *module;
    const terrace_kernel *kernel;
    unsigned shared_bytes_max = SHARED_BYTES_DEFAULT;
};

struct Module {
    Context *context;
    // Its own, if it takes any.
    void *memory = nullptr;
    std::map<std::string, Function> functions;
};

struct Driver {
    std::mutex mutex;
    std::atomic<bool> started{false};
    std::vector<std::unique_ptr<Context>> devices;
    // Handles that are alive: others are refused.
    std::map<void *, std::shared_ptr<Stream>> streams;
    std::map<void *, std::unique_ptr<Event>> events;
    std::map<void *, std::unique_ptr<Module>> modules;
};

Driver &driver() {
    static Driver *driver = new Driver;
    return *driver;
}

thread_local Context *current = nullptr;

// Counts the call, and what may keep it from doing anything.
int enter(const char *name) {
    if (const int injected = Calls::all().enter(name)) {
        if (current) current->settle(injected);
        return injected;
    }
    return driver().started ? SUCCESS : NOT_INITIALIZED;
}

int enter_context(const char *name) {
    if (const int refused = enter(name)) return refused;
    if (!current) return INVALID_CONTEXT;
    return current->ended();
}

#define ENTER() \
    if (const int refused = enter(__func__)) return refused
#define ENTER_CONTEXT() \
    if (const int refused = enter_context(__func__)) return refused

Context *device(int number) {
    auto &devices = driver().devices;
    return number >= 0 && number < static_cast<int>(devices.size()) ? devices[number].get() : nullptr;
}

std::shared_ptr<Stream> find_stream(void *handle) {
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().streams.find(handle);
    return found == driver().streams.end() ? nullptr : found->second;
}

// The event's present point, null if it was never recorded; false if there is no such event.
bool find_point(void *handle, std::shared_ptr<Point> *point, bool *timed = nullptr) {
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().events.find(handle);
    if (found == driver().events.end()) return false;
    *point = found->second->point;
    if (timed) *timed = found->second->timed;
    return true;
}

void *pointer(uint64_t address) { return reinterpret_cast<void *>(address); }

// Copies that touch no device memory outside an allocation, now or later.
int copy(void *stream_handle, void *to, bool to_device, const void *from, bool from_device, size_t bytes,
         std::shared_ptr<std::vector<char>> staged) {
    const auto stream = find_stream(stream_handle);
    if (!stream) return INVALID_HANDLE;
    Context *context = &stream->context();
    const auto valid = [=] {
        return (!to_device || context->memory.holds(to, bytes)) &&
               (!from_device || context->memory.holds(from, bytes));
    };
    if (!valid()) return INVALID_VALUE;
    const auto *first = static_cast<const unsigned char *>(from);
    const auto *target = static_cast<const unsigned char *>(to);
    const bool apart = first + bytes <= target || target + bytes <= first;
    stream->enqueue(
        [=] {
            if (!valid()) return int{ILLEGAL_ADDRESS};
            if (apart) std::memset(to, POISON, bytes);
            return int{SUCCESS};
        },
        [=] {
            if (!valid()) return int{ILLEGAL_ADDRESS};
            std::memmove(to, staged ? staged->data() : from, bytes);
            return int{SUCCESS};
        });
    return SUCCESS;
}

const terrace_kernel *find_kernel(const char *name) {
    using Find = const terrace_kernel *(*)(const char *);
    static const Find find = []() -> Find {
        const char *path = std::getenv("TERRACE_SHIM_LIBRARY");
        void *library = path ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
        if (!library) {
            std::fprintf(stderr, "mock driver: no kernels: TERRACE_SHIM_LIBRARY: %s\n", path ? dlerror() : "not set");
            return nullptr;
        }
        return reinterpret_cast<Find>(dlsym(library, "terrace_shim_find"));
    }();
    return find ? find(name) : nullptr;
}

struct Named {
    int code;
    const char *name;
    const char *sentence;
};

const Named ERRORS[] = {
    {SUCCESS, "CUDA_SUCCESS", "no error"},
    {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {34, "CUDA_ERROR_STUB_LIBRARY", "CUDA driver is a stub library"},
    {NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"},
    {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {NO_BINARY_FOR_GPU, "CUDA_ERROR_NO_BINARY_FOR_GPU", "no kernel image is available for execution on the device"},
    {UNSUPPORTED_PTX_VERSION, "CUDA_ERROR_UNSUPPORTED_PTX_VERSION", "the provided PTX was compiled with an unsupported toolchain."},
    {304, "CUDA_ERROR_OPERATING_SYSTEM", "OS call failed or operation not supported on this OS"},
    {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid resource handle"},
    {NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "named symbol not found"},
    {NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"},
    {ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "part or all of the memory is already mapped"},
    {NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "pointer does not correspond to a registered region"},
    {719, "CUDA_ERROR_LAUNCH_FAILED", "unspecified launch failure"},
    {803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "system has unsupported display driver / cuda driver combination"},
    {999, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

const Named *find_error(int code) {
    const auto *found = std::find_if(std::begin(ERRORS), std::end(ERRORS), [=](const Named &e) { return e.code == code; });
    return found == std::end(ERRORS) ? nullptr : found;
}

}  // namespace

// The mock's own.

EXPORT long terrace_mock_calls(const char *name) { return Calls::all().count(name); }

// Start, errors, devices.

EXPORT int cuInit(unsigned) {
    if (const int injected = Calls::all().enter(__func__)) return injected;
    Driver &all = driver();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (all.started) return SUCCESS;
    if (number("TERRACE_MOCK_DEVICES", 1) == 0) return NO_DEVICE;
    const long memory = number("TERRACE_MOCK_MEMORY", 1L << 30);
    for (long ordinal = 0; ordinal < number("TERRACE_MOCK_DEVICES", 1); ++ordinal)
        all.devices.push_back(std::make_unique<Context>(static_cast<int>(ordinal), memory));
    all.started = true;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) {
    // Also before the driver is started.
    if (const int injected = Calls::all().enter(__func__)) return injected;
    *version = version_of("TERRACE_MOCK_DRIVER", 13, 0).cuda();
    return SUCCESS;
}

EXPORT int cuGetErrorName(int code, const char **text) {
    const Named *found = find_error(code);
    *text = found ? found->name : nullptr;
    return found ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuGetErrorString(int code, const char **text) {
    const Named *found = find_error(code);
    *text = found ? found->sentence : nullptr;
    return found ? SUCCESS : INVALID_VALUE;
}

EXPORT int cuDeviceGetCount(int *count) {
    ENTER();
    *count = static_cast<int>(driver().devices.size());
    return SUCCESS;
}

EXPORT int cuDeviceGet(int *result, int ordinal) {
    ENTER();
    if (!device(ordinal)) return INVALID_DEVICE;
    *result = ordinal;
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *name, int length, int number) {
    ENTER();
    if (!device(number)) return INVALID_DEVICE;
    std::snprintf(name, length, "Mock Accelerator %d", number);
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int number) {
    ENTER();
    if (!device(number)) return INVALID_DEVICE;
    *bytes = device(number)->memory.total();
    return SUCCESS;
}

EXPORT int cuDeviceGetPCIBusId(char *id, int length, int number) {
    ENTER();
    if (!device(number)) return INVALID_DEVICE;
    std::snprintf(id, length, "0000:%02X:00.0", 0xE0 + number);
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int ordinal) {
    ENTER();
    if (!device(ordinal)) return INVALID_DEVICE;
    const int capability = static_cast<int>(number("TERRACE_MOCK_SM", 90));
    const std::map<int, int> values = {
        {1, BLOCK_THREADS_MAX}, {8, SHARED_BYTES_DEFAULT}, {10, 32},          {16, 4},
        {33, 0xE0 + ordinal},   {38, 50 << 20},            {40, 3},           {41, 1},
        {75, capability / 10},  {76, capability % 10},     {97, SHARED_BYTES_MAX},
    };
    const auto found = values.find(attribute);
    *value = found == values.end() ? 0 : found->second;
    return SUCCESS;
}

// The driver's private tables. The real NVRTC, which may run beside this driver, asks for one and does without, but crashes
// where there is no such function.
EXPORT int cuGetExportTable(const void **table, const void *) {
    *table = nullptr;
    return NOT_FOUND;
}

// Contexts.

EXPORT int cuDevicePrimaryCtxRetain(void **context, int number) {
    ENTER();
    if (!device(number)) return INVALID_DEVICE;
    ++device(number)->retained;
    *context = device(number);
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int number) {
    ENTER();
    Context *context = device(number);
    if (!context) return INVALID_DEVICE;
    if (context->retained <= 0) return INVALID_CONTEXT;
    if (--context->retained == 0) {
        context->synchronize();
        context->memory.check_freed();
        context->reset();
    }
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void **context) {
    ENTER();
    *context = current;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) {
    ENTER();
    auto *chosen = static_cast<Context *>(context);
    if (chosen && chosen->retained <= 0) return INVALID_CONTEXT;
    current = chosen;
    return SUCCESS;
}

EXPORT int cuCtxSynchronize() {
    ENTER_CONTEXT();
    current->synchronize();
    return current->ended();
}

// Memory.

EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT();
    *free_bytes = current->memory.free_bytes();
    *total = current->memory.total();
    return SUCCESS;
}

EXPORT int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    ENTER_CONTEXT();
    current->memory.check_freed();
    void *start = nullptr;
    const int result = current->memory.allocate(bytes, &start);
    *address = reinterpret_cast<uint64_t>(start);
    return result;
}

EXPORT int cuMemFree_v2(uint64_t address) {
    ENTER_CONTEXT();
    current->synchronize();
    return current->memory.release(pointer(address));
}

EXPORT int cuMemHostAlloc(void **start, size_t bytes, unsigned) {
    ENTER_CONTEXT();
    if (bytes == 0) return INVALID_VALUE;
    const size_t whole = (bytes + 4095) / 4096 * 4096;
    void *memory = std::aligned_alloc(4096, whole);
    if (!memory) return OUT_OF_MEMORY;
    std::memset(memory, POISON, whole);
    *start = memory;
    return Pinned::all().add(memory, whole);
}

EXPORT int cuMemFreeHost(void *start) {
    ENTER_CONTEXT();
    current->synchronize();
    const int result = Pinned::all().remove(start);
    if (result == SUCCESS) std::free(start);
    return result;
}

EXPORT int cuMemHostRegister_v2(void *start, size_t bytes, unsigned) {
    ENTER_CONTEXT();
    return bytes == 0 ? INVALID_VALUE : Pinned::all().add(start, bytes);
}

EXPORT int cuMemHostUnregister(void *start) {
    ENTER_CONTEXT();
    current->synchronize();
    return Pinned::all().remove(start);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    ENTER_CONTEXT();
    std::shared_ptr<std::vector<char>> staged;
    if (!Pinned::all().holds(from, bytes)) {
        Calls::all().enter("unpinned");
        const auto *first = static_cast<const char *>(from);
        staged = std::make_shared<std::vector<char>>(first, first + bytes);
    }
    return copy(stream, pointer(to), true, from, false, bytes, staged);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    ENTER_CONTEXT();
    const int result = copy(stream, to, false, pointer(from), true, bytes, nullptr);
    if (result == SUCCESS && !Pinned::all().holds(to, bytes)) {
        Calls::all().enter("unpinned");
        find_stream(stream)->drain();
        return current->ended();
    }
    return result;
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    ENTER_CONTEXT();
    return copy(stream, pointer(to), true, pointer(from), true, bytes, nullptr);
}

EXPORT int cuMemsetD8Async(uint64_t to, unsigned char value, size_t bytes, void *handle) {
    ENTER_CONTEXT();
    const auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    Context *context = &stream->context();
    void *start = pointer(to);
    if (!context->memory.holds(start, bytes)) return INVALID_VALUE;
    stream->enqueue([] { return int{SUCCESS}; },
                    [=] {
                        if (!context->memory.holds(start, bytes)) return int{ILLEGAL_ADDRESS};
                        std::memset(start, value, bytes);
                        return int{SUCCESS};
                    });
    return SUCCESS;
}

// Streams and events.

EXPORT int cuStreamCreate(void **stream, unsigned) {
    ENTER_CONTEXT();
    auto made = current->make_stream();
    *stream = made.get();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().streams[made.get()] = made;
    return SUCCESS;
}

EXPORT int cuStreamDestroy_v2(void *handle) {
    ENTER_CONTEXT();
    const auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    stream->close();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().streams.erase(handle);
    return SUCCESS;
}

EXPORT int cuStreamSynchronize(void *handle) {
    ENTER_CONTEXT();
    const auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    stream->drain();
    return current->ended();
}

EXPORT int cuStreamWaitEvent(void *handle, void *event, unsigned) {
    ENTER_CONTEXT();
    const auto stream = find_stream(handle);
    std::shared_ptr<Point> point;
    if (!stream || !find_point(event, &point)) return INVALID_HANDLE;
    // A program whose waits are forgotten must not go on as if nothing were wrong: what tests of it are for.
    static const long forgotten = number("TERRACE_MOCK_FORGET_WAITS", 0);
    if (forgotten > 0 && Calls::all().count("cuStreamWaitEvent") % forgotten == 0) return SUCCESS;
    if (point) stream->wait_for(point);
    return SUCCESS;
}

EXPORT int cuEventCreate(void **event, unsigned flags) {
    ENTER_CONTEXT();
    auto made = std::make_unique<Event>();
    made->timed = (flags & 2) == 0;
    *event = made.get();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().events[made.get()] = std::move(made);
    return SUCCESS;
}

EXPORT int cuEventDestroy_v2(void *event) {
    ENTER_CONTEXT();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    return driver().events.erase(event) ? SUCCESS : INVALID_HANDLE;
}

EXPORT int cuEventRecord(void *event, void *handle) {
    ENTER_CONTEXT();
    const auto stream = find_stream(handle);
    if (!stream) return INVALID_HANDLE;
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().events.find(event);
    if (found == driver().events.end()) return INVALID_HANDLE;
    found->second->point = stream->record();
    return SUCCESS;
}

EXPORT int cuEventQuery(void *event) {
    ENTER_CONTEXT();
    std::shared_ptr<Point> point;
    if (!find_point(event, &point)) return INVALID_HANDLE;
    return !point || point->is_reached() ? SUCCESS : NOT_READY;
}

EXPORT int cuEventSynchronize(void *event) {
    ENTER_CONTEXT();
    std::shared_ptr<Point> point;
    if (!find_point(event, &point)) return INVALID_HANDLE;
    if (point) point->wait();
    return current->ended();
}

EXPORT int cuEventElapsedTime(float *milliseconds, void *start, void *end) {
    ENTER_CONTEXT();
    std::shared_ptr<Point> first, second;
    bool first_timed, second_timed;
    if (!find_point(start, &first, &first_timed) || !find_point(end, &second, &second_timed)) return INVALID_HANDLE;
    if (!first || !second || !first_timed || !second_timed) return INVALID_HANDLE;
    if (!first->is_reached() || !second->is_reached()) return NOT_READY;
    *milliseconds = std::chrono::duration<float, std::milli>(second->when() - first->when()).count();
    return SUCCESS;
}

// Modules and launches.

EXPORT int cuModuleLoadDataEx(void **module, const void *image, unsigned count, int *options, void **values) {
    ENTER_CONTEXT();
    const std::string text = static_cast<const char *>(image);
    const auto refuse = [&](int result, const std::string &why) {
        for (unsigned i = 0; i + 1 < count; ++i) {
            // The log's buffer and its size.
            if (options[i] == 5 && options[i + 1] == 6)
                std::snprintf(static_cast<char *>(values[i]), reinterpret_cast<size_t>(values[i + 1]), "%s", why.c_str());
        }
        return result;
    };
    // What the real NVRTC makes loads, too: kernels come from the shim library in any case.
    const bool is_real = text.find(".version") != std::string::npos || text.rfind("\x7f" "ELF", 0) == 0;
    if (text.rfind("TERRACE-MOCK-IMAGE ", 0) != 0 && !is_real) return refuse(INVALID_IMAGE, "neither an image nor PTX");
    const Version own_version = version_of("TERRACE_MOCK_DRIVER", 13, 0);
    const Version ptx = version_after(text, ".version ", {0, 0}), compiler = version_after(text, "// NVRTC ", {0, 0});
    if (own_version.ptx() < ptx)
        return refuse(UNSUPPORTED_PTX_VERSION, "PTX of this version is not supported");
    if (own_version.major < compiler.major) return refuse(INVALID_IMAGE, "");
    const std::string own = "sm_" + std::to_string(number("TERRACE_MOCK_SM", 90));
    const std::string first = text.substr(0, text.find('\n'));
    if (!is_real && first.find("sm_") != std::string::npos && first.find(own) == std::string::npos)
        return refuse(NO_BINARY_FOR_GPU, first + " does not run on " + own);
    auto made = std::make_unique<Module>();
    made->context = current;
    const long bytes = number("TERRACE_MOCK_MODULE_MEMORY", 0);
    if (bytes > 0)
        if (const int refused = current->memory.allocate(bytes, &made->memory)) return refused;
    *module = made.get();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    driver().modules[made.get()] = std::move(made);
    return SUCCESS;
}

EXPORT int cuModuleLoadData(void **module, const void *image) {
    ENTER_CONTEXT();
    return cuModuleLoadDataEx(module, image, 0, nullptr, nullptr);
}

EXPORT int cuModuleUnload(void *module) {
    ENTER_CONTEXT();
    current->synchronize();
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().modules.find(module);
    if (found == driver().modules.end()) return INVALID_HANDLE;
    if (found->second->memory) current->memory.release(found->second->memory);
    driver().modules.erase(found);
    return SUCCESS;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    ENTER_CONTEXT();
    const terrace_kernel *kernel = find_kernel(name);
    const std::lock_guard<std::mutex> lock(driver().mutex);
    const auto found = driver().modules.find(module);
    if (found == driver().modules.end()) return INVALID_HANDLE;
    if (!kernel) return NOT_FOUND;
    Module &owner = *found->second;
    *function = &owner.functions.try_emplace(name, Function{&owner, kernel}).first->second;
    return SUCCESS;
}

EXPORT int cuFuncSetAttribute(void *handle, int attribute, int value) {
    ENTER_CONTEXT();
    if (attribute != 8) return INVALID_VALUE;
    if (value < 0 || static_cast<unsigned>(value) > SHARED_BYTES_MAX) return INVALID_VALUE;
    static_cast<Function *>(handle)->shared_bytes_max = value;
    return SUCCESS;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *handle) {
    ENTER_CONTEXT();
    switch (attribute) {
        case 0: *value = BLOCK_THREADS_MAX; break;
        case 4: *value = 32; break;
        case 8: *value = static_cast<int>(static_cast<Function *>(handle)->shared_bytes_max); break;
        default: *value = 0;
    }
    return SUCCESS;
}

EXPORT int cuLaunchKernel(void *handle, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream_handle, void **args,
                          void **) {
    ENTER_CONTEXT();
    const auto stream = find_stream(stream_handle);
    if (!stream || !handle) return INVALID_HANDLE;
    const Function &function = *static_cast<Function *>(handle);
    if (function.module->context != current || &stream->context() != current) return INVALID_HANDLE;
    const uint64_t threads = uint64_t{block_x} * block_y * block_z;
    if (threads == 0 || threads > BLOCK_THREADS_MAX || block_z > 64) return INVALID_VALUE;
    if (uint64_t{grid_x} * grid_y * grid_z == 0 || grid_x > 0x7fffffff || grid_y > 65535 || grid_z > 65535)
        return INVALID_VALUE;
    if (shared_bytes > function.shared_bytes_max) return INVALID_VALUE;
    const terrace_kernel *kernel = function.kernel;
    // The caller's values may be gone when the kernel runs.
    auto values = std::make_shared<std::vector<std::vector<std::max_align_t>>>();
    for (int i = 0; i < kernel->parameters; ++i) {
        if (!args || !args[i]) return INVALID_VALUE;
        const size_t bytes = kernel->parameter_bytes[i];
        values->emplace_back(bytes / sizeof(std::max_align_t) + 1);
        std::memcpy(values->back().data(), args[i], bytes);
    }
    stream->enqueue([] { return int{SUCCESS}; },
                    [=] {
                        std::vector<void *> addresses;
                        for (auto &value : *values) addresses.push_back(value.data());
                        const unsigned grid[3] = {grid_x, grid_y, grid_z};
                        const unsigned block[3] = {block_x, block_y, block_z};
                        kernel->run(addresses.data(), grid, block, shared_bytes);
                        return int{SUCCESS};
                    });
    return SUCCESS;
}
