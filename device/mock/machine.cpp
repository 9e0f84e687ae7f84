#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <set>

#include "faults.h"

namespace mock {

namespace {

// Bytes of one allocation that are poisoned; filling all of a large arena would take longer than the tests.
constexpr size_t POISONED_BYTES_MAX = size_t{256} << 20;
// Bytes of freed memory that are kept.
constexpr size_t FREED_BYTES_MAX = size_t{256} << 20;

size_t mapped(size_t bytes) { return (bytes + 4095) / 4096 * 4096; }

bool within(const std::map<unsigned char *, size_t> &ranges, const void *start, size_t bytes) {
    auto *first = static_cast<unsigned char *>(const_cast<void *>(start));
    auto after = ranges.upper_bound(first);
    if (after == ranges.begin()) return false;
    const auto &[base, length] = *std::prev(after);
    const size_t offset = first - base;
    return offset <= length && bytes <= length - offset;
}

}  // namespace

bool is_sticky(int result) {
    static const std::set<int> sticky = {214, 220, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 911, 999};
    return sticky.count(result) != 0;
}

void Point::reach() {
    const std::lock_guard<std::mutex> lock(mutex_);
    reached_ = true;
    when_ = std::chrono::steady_clock::now();
    changed_.notify_all();
}

void Point::wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return reached_; });
}

bool Point::is_reached() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
}

std::chrono::steady_clock::time_point Point::when() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return when_;
}

Stream::Stream(Context &context, unsigned seed, long delay_us_max)
    : context_(context), random_(seed), delay_us_max_(delay_us_max) {}

std::shared_ptr<Stream> Stream::start(Context &context, unsigned seed, long delay_us_max) {
    std::shared_ptr<Stream> stream(new Stream(context, seed, delay_us_max));
    std::thread([stream] { stream->work(); }).detach();
    return stream;
}

void Stream::push(std::function<void()> job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    jobs_.push_back(std::move(job));
    ++pushed_;
    changed_.notify_all();
}

void Stream::drain() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned long until = pushed_;
    changed_.wait(lock, [&] { return done_ >= until; });
}

void Stream::work() {
    for (;;) {
        std::function<void()> job;
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [this] { return closed_ || !jobs_.empty(); });
            if (jobs_.empty()) return;
            job = std::move(jobs_.front());
            jobs_.pop_front();
        }
        job();
        const std::lock_guard<std::mutex> lock(mutex_);
        ++done_;
        changed_.notify_all();
    }
}

void Stream::enqueue(std::function<int()> begin, std::function<int()> end) {
    push([this, begin = std::move(begin), end = std::move(end)] {
        if (context_.ended()) return;
        if (context_.settle(begin()) != SUCCESS) return;
        if (delay_us_max_ > 0) {
            const long delay = std::uniform_int_distribution<long>(0, delay_us_max_)(random_);
            std::this_thread::sleep_for(std::chrono::microseconds(delay));
        }
        context_.settle(end());
    });
}

std::shared_ptr<Point> Stream::record() {
    auto point = std::make_shared<Point>();
    push([point] { point->reach(); });
    return point;
}

void Stream::wait_for(std::shared_ptr<Point> point) {
    push([point] { point->wait(); });
}

void Stream::close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
    changed_.notify_all();
}

int Memory::allocate(size_t bytes, void **address) {
    if (bytes == 0) return INVALID_VALUE;
    const std::lock_guard<std::mutex> lock(mutex_);
    if (bytes > total_ - used_) return OUT_OF_MEMORY;
    void *start = mmap(nullptr, mapped(bytes), PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) return OUT_OF_MEMORY;
    std::memset(start, POISON, std::min(bytes, POISONED_BYTES_MAX));
    used_ += bytes;
    allocations_[static_cast<unsigned char *>(start)] = bytes;
    *address = start;
    return SUCCESS;
}

int Memory::release(void *address) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = allocations_.find(static_cast<unsigned char *>(address));
    if (found == allocations_.end()) return INVALID_VALUE;
    const auto [start, bytes] = *found;
    allocations_.erase(found);
    used_ -= bytes;
    if (bytes > FREED_BYTES_MAX) {
        // Too much to keep: any use faults.
        mprotect(start, mapped(bytes), PROT_NONE);
        madvise(start, mapped(bytes), MADV_DONTNEED);
        return SUCCESS;
    }
    std::memset(start, POISON, bytes);
    freed_.push_back({start, bytes, bytes});
    freed_bytes_ += bytes;
    while (freed_bytes_ > FREED_BYTES_MAX) {
        const Freed oldest = freed_.front();
        check(oldest);
        munmap(oldest.start, mapped(oldest.bytes));
        freed_bytes_ -= oldest.bytes;
        freed_.pop_front();
    }
    return SUCCESS;
}

bool Memory::holds(const void *start, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return within(allocations_, start, bytes);
}

size_t Memory::free_bytes() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return total_ - used_;
}

void Memory::check_freed() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const Freed &freed : freed_) check(freed);
}

void Memory::check(const Freed &freed) {
    const unsigned char *end = freed.start + freed.poisoned;
    const unsigned char *wrong = std::find_if(freed.start, freed.start + freed.poisoned,
                                              [](unsigned char byte) { return byte != POISON; });
    if (wrong == end) return;
    std::fprintf(stderr, "mock driver: freed device memory was written at offset %zu of %zu bytes\n",
                 static_cast<size_t>(wrong - freed.start), freed.bytes);
    std::abort();
}

int Context::settle(int result) {
    if (is_sticky(result)) {
        int none = 0;
        ended_.compare_exchange_strong(none, result);
    }
    return result;
}

std::shared_ptr<Stream> Context::make_stream() {
    static const long delay = number("TERRACE_MOCK_DELAY_US", 20);
    static const long seed = number("TERRACE_MOCK_SEED", 1);
    const std::lock_guard<std::mutex> lock(mutex_);
    auto stream = Stream::start(*this, static_cast<unsigned>(seed * 1000003 + streams_.size()), delay);
    streams_.push_back(stream);
    return stream;
}

void Context::synchronize() {
    std::vector<std::shared_ptr<Stream>> streams;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        streams = streams_;
    }
    for (const auto &stream : streams) stream->drain();
}

int Pinned::add(void *start, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto *first = static_cast<unsigned char *>(start);
    auto after = ranges_.lower_bound(first);
    if (after != ranges_.end() && after->first < first + bytes) return ALREADY_REGISTERED;
    if (after != ranges_.begin()) {
        const auto &[base, length] = *std::prev(after);
        if (base + length > first) return ALREADY_REGISTERED;
    }
    ranges_[first] = bytes;
    return SUCCESS;
}

int Pinned::remove(void *start) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return ranges_.erase(static_cast<unsigned char *>(start)) ? SUCCESS : NOT_REGISTERED;
}

bool Pinned::holds(const void *start, size_t bytes) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return within(ranges_, start, bytes);
}

Pinned &Pinned::all() {
    static Pinned *pinned = new Pinned;
    return *pinned;
}

}  // namespace mock
