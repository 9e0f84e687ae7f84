// The card that the mock driver plays: contexts, memory, streams and points in them.
#pragma once
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

namespace mock {

constexpr unsigned char POISON = 0xFF;

// The numbers of cuda.h.
enum Result : int {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    INVALID_CONTEXT = 201,
    NO_BINARY_FOR_GPU = 209,
    UNSUPPORTED_PTX_VERSION = 222,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
};

// Whether an error ends its context.
bool is_sticky(int result);

// A point in a stream; reached once.
class Point {
  public:
    void reach();
    void wait();
    bool is_reached();
    std::chrono::steady_clock::time_point when();

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool reached_ = false;
    std::chrono::steady_clock::time_point when_;
};

class Context;

// A queue with a thread that works it off, in order.
class Stream {
  public:
    static std::shared_ptr<Stream> start(Context &context, unsigned seed, long delay_us_max);
    // Work that takes a random time first; its result, if sticky, ends the context.
    void enqueue(std::function<int()> begin, std::function<int()> end);
    // A point that is reached when everything before it is done.
    std::shared_ptr<Point> record();
    // What follows is done after the point is reached.
    void wait_for(std::shared_ptr<Point> point);
    // Blocks until everything enqueued so far is done.
    void drain();
    // No more work comes; what is there is still done.
    void close();
    Context &context() { return context_; }

  private:
    Stream(Context &context, unsigned seed, long delay_us_max);
    void push(std::function<void()> job);
    void work();

    Context &context_;
    std::mt19937_64 random_;
    long delay_us_max_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    bool closed_ = false;
    // Jobs ever enqueued, and done.
    unsigned long pushed_ = 0;
    unsigned long done_ = 0;
};

// Device memory: allocations, and freed ones that nobody may touch.
class Memory {
  public:
    explicit Memory(size_t total) : total_(total) {}
    int allocate(size_t bytes, void **address);
    int release(void *address);
    // Whether the range lies within one allocation.
    bool holds(const void *start, size_t bytes);
    size_t total() const { return total_; }
    size_t free_bytes();
    // Ends the process if freed memory was written.
    void check_freed();

  private:
    struct Freed {
        unsigned char *start;
        size_t bytes;
        size_t poisoned;
    };
    void check(const Freed &freed);

    std::mutex mutex_;
    std::map<unsigned char *, size_t> allocations_;
    std::deque<Freed> freed_;
    size_t freed_bytes_ = 0;
    size_t used_ = 0;
    const size_t total_;
};

// A device with its primary context, which lives as long as the process.
class Context {
  public:
    Context(int ordinal, size_t memory_bytes) : memory(memory_bytes), ordinal_(ordinal) {}
    int ordinal() const { return ordinal_; }
    // The error that ended the context, or 0.
    int ended() const { return ended_; }
    // Ends the context if the result does that; gives it back.
    int settle(int result);
    // Waits for all streams, closed ones included.
    void synchronize();
    std::shared_ptr<Stream> make_stream();

    Memory memory;
    std::atomic<int> retained{0};
    void reset() { ended_ = 0; }

  private:
    const int ordinal_;
    std::atomic<int> ended_{0};
    std::mutex mutex_;
    std::vector<std::shared_ptr<Stream>> streams_;
};

// Host ranges that were pinned, whoever pinned them.
class Pinned {
  public:
    int add(void *start, size_t bytes);
    int remove(void *start);
    bool holds(const void *start, size_t bytes);
    static Pinned &all();

  private:
    std::mutex mutex_;
    std::map<unsigned char *, size_t> ranges_;
};

}  // namespace mock
