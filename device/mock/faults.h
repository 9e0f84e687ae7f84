// Calls that are counted, and fail when TERRACE_MOCK_FAIL says so.
#pragma once
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace mock {

inline long number(const char *name, long otherwise) {
    const char *text = std::getenv(name);
    if (!text || !*text) return otherwise;
    char *unit;
    long value = std::strtol(text, &unit, 10);
    const std::string suffix = unit;
    return suffix == "KiB" ? value << 10 : suffix == "MiB" ? value << 20 : suffix == "GiB" ? value << 30 : value;
}

// A version of CUDA, or of PTX.
struct Version {
    long major, minor;
    bool operator<(const Version &other) const {
        return major < other.major || (major == other.major && minor < other.minor);
    }
    int cuda() const { return static_cast<int>(major * 1000 + minor * 10); }
    // Of the newest PTX that CUDA of this version knows.
    Version ptx() const { return {major - 4, major == 12 && minor > 5 ? minor - 1 : minor}; }
};

// What follows the first of these words in a text, as `12.4`.
inline Version version_after(const std::string &text, const std::string &words, Version otherwise) {
    const size_t at = text.find(words);
    if (at == std::string::npos) return otherwise;
    char *point;
    const long major = std::strtol(text.c_str() + at + words.size(), &point, 10);
    return {major, *point == '.' ? std::strtol(point + 1, nullptr, 10) : 0};
}

inline Version version_of(const char *name, long major, long minor) {
    const char *text = std::getenv(name);
    return text ? version_after(text, "", {major, minor}) : Version{major, minor};
}

class Calls {
  public:
    // Counts a call; the error it is to fail with, or 0.
    int enter(const std::string &name) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const long nth = ++counts_[name];
        const auto failure = failures_.find({name, nth});
        return failure == failures_.end() ? 0 : failure->second;
    }

    long count(const std::string &name) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto found = counts_.find(name);
        return found == counts_.end() ? 0 : found->second;
    }

    // Writes a line with each call's name and count.
    void write(const char *path) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::ofstream file(path);
        for (const auto &[name, count] : counts_) file << name << " " << count << "\n";
    }

    // Never destroyed: threads of streams may outlive main.
    static Calls &all() {
        static Calls *calls = new Calls;
        return *calls;
    }

  private:
    Calls() {
        if (std::getenv("TERRACE_MOCK_COUNTS")) std::atexit([] { all().write(std::getenv("TERRACE_MOCK_COUNTS")); });
        const char *text = std::getenv("TERRACE_MOCK_FAIL");
        std::istringstream list(text ? text : "");
        for (std::string item; std::getline(list, item, ',');) {
            std::istringstream parts(item);
            std::string name, nth, error;
            std::getline(parts, name, ':');
            std::getline(parts, nth, ':');
            std::getline(parts, error, ':');
            const int code = error.empty() ? 304 : std::atoi(error.c_str());
            failures_[{name, std::atol(nth.c_str())}] = code;
        }
    }

    std::mutex mutex_;
    std::map<std::string, long> counts_;
    std::map<std::pair<std::string, long>, int> failures_;
};

}  // namespace mock
