// libnvrtc.so.13, or that of another version: "compiles" a source to an image that holds its text. A source with `#error` does not
// compile.
#include <algorithm>
#include <cstring>

#include "faults.h"

#ifndef MOCK_NVRTC_VERSION
#define MOCK_NVRTC_VERSION {13, 0}
#endif

using mock::Calls;

namespace {

enum Result { SUCCESS = 0, INVALID_INPUT = 3, INVALID_PROGRAM = 4, INVALID_OPTION = 5, COMPILATION = 6 };

constexpr mock::Version VERSION = MOCK_NVRTC_VERSION;

// Turing to Blackwell, as NVRTC 13.0 lists them.
const int ARCHITECTURES[] = {75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121};

struct Program {
    // As the real one may, it keeps what the caller gave by address, and reads it when it compiles.
    const char *source;
    int header_count;
    const char *const *headers;
    const char *const *header_names;
    std::string name;
    std::string text;
    std::string log;
    std::string image;
};

#define ENTER() \
    if (const int injected = Calls::all().enter(__func__)) return injected

int give(const std::string &text, char *to) {
    // With the zero that ends it, as the sizes below count.
    std::memcpy(to, text.c_str(), text.size() + 1);
    return SUCCESS;
}

int fail(Program &program, size_t at, const std::string &why) {
    const auto line = 1 + std::count(program.text.begin(), program.text.begin() + at, '\n');
    program.log = program.name + "(" + std::to_string(line) + "): error: " + why + "\n1 error detected in the compilation.\n";
    return COMPILATION;
}

}  // namespace

EXPORT int nvrtcVersion(int *major, int *minor) {
    ENTER();
    *major = static_cast<int>(VERSION.major);
    *minor = static_cast<int>(VERSION.minor);
    return SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(int result) {
    switch (result) {
        case SUCCESS: return "NVRTC_SUCCESS";
        case INVALID_INPUT: return "NVRTC_ERROR_INVALID_INPUT";
        case INVALID_PROGRAM: return "NVRTC_ERROR_INVALID_PROGRAM";
        case INVALID_OPTION: return "NVRTC_ERROR_INVALID_OPTION";
        case COMPILATION: return "NVRTC_ERROR_COMPILATION";
        default: return "NVRTC_ERROR unknown";
    }
}

EXPORT int nvrtcGetNumSupportedArchs(int *count) {
    ENTER();
    *count = sizeof ARCHITECTURES / sizeof *ARCHITECTURES;
    return SUCCESS;
}

EXPORT int nvrtcGetSupportedArchs(int *numbers) {
    ENTER();
    std::memcpy(numbers, ARCHITECTURES, sizeof ARCHITECTURES);
    return SUCCESS;
}

EXPORT int nvrtcCreateProgram(Program **program, const char *text, const char *name, int count, const char *const *headers,
                              const char *const *names) {
    ENTER();
    if (!text || (count > 0 && (!headers || !names))) return INVALID_INPUT;
    *program = new Program{text, count, headers, names, name ? name : "default_program", "", "", ""};
    return SUCCESS;
}

EXPORT int nvrtcDestroyProgram(Program **program) {
    delete *program;
    *program = nullptr;
    return SUCCESS;
}

EXPORT int nvrtcCompileProgram(Program *program, int count, const char *const *options) {
    ENTER();
    program->text = program->source;
    for (int i = 0; i < program->header_count; ++i)
        program->text += std::string("\n// ") + program->header_names[i] + "\n" + program->headers[i];
    const std::string wanted = "--gpu-architecture=";
    std::string architecture;
    for (int i = 0; i < count; ++i) {
        const std::string option = options[i];
        if (option.rfind("-", 0) != 0) return INVALID_OPTION;
        if (option.rfind(wanted, 0) == 0) architecture = option.substr(wanted.size());
    }
    const size_t wrong = program->text.find("#error");
    if (wrong != std::string::npos) {
        const size_t end = std::min(program->text.find('\n', wrong), program->text.size());
        return fail(*program, wrong, "#error directive:" + program->text.substr(wrong + 6, end - wrong - 6));
    }
    const auto written = [](mock::Version version) {
        return std::to_string(version.major) + "." + std::to_string(version.minor) + "\n";
    };
    const bool is_ptx = architecture.rfind("compute_", 0) == 0;
    program->image = "TERRACE-MOCK-IMAGE " + architecture + "\n" +
                     (is_ptx ? ".version " + written(VERSION.ptx()) : "// NVRTC " + written(VERSION)) + program->text;
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLogSize(Program *program, size_t *bytes) {
    *bytes = program->log.size() + 1;
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLog(Program *program, char *log) { return give(program->log, log); }

EXPORT int nvrtcGetCUBINSize(Program *program, size_t *bytes) {
    // There is none for a virtual architecture.
    *bytes = program->image.rfind("TERRACE-MOCK-IMAGE sm_", 0) == 0 ? program->image.size() + 1 : 0;
    return SUCCESS;
}

EXPORT int nvrtcGetCUBIN(Program *program, char *image) { return give(program->image, image); }

EXPORT int nvrtcGetPTXSize(Program *program, size_t *bytes) {
    *bytes = program->image.size() + 1;
    return SUCCESS;
}

EXPORT int nvrtcGetPTX(Program *program, char *image) { return give(program->image, image); }
