// Loops shared with a pool of helpers.
//
// The caller always works itself, and never waits for a helper that has not started: on a machine whose cores are
// shared with other processes a helper may wake up late, and a team with a barrier (OpenMP) would then stand still. So
// helpers take indices while there are any, the caller closes the job when none is left, and waits only for those
// that are inside. Idle helpers spin for SPIN, to be awake when the next operator of a step follows, then sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>

#include <pthread.h>

#include "simd.h"

namespace shoal {

SHOAL_INLINE void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

class Pool {
public:
    using Body = void (*)(const void* context, i64 begin, i64 end);

    // The process's pool. It is never destroyed: its threads may sleep in it until the process ends.
    static Pool& instance() {
        static const bool registered = (pthread_atfork(nullptr, nullptr, [] { current() = new Pool; }), true);
        (void)registered;
        return *current();
    }

    // body(context, begin, end) for parts of [0, count), on the caller and at most threads - 1 helpers. Who is free
    // takes one in `divisor` of what is left.
    void run(i64 count, int threads, i64 divisor, Body body, const void* context) {
        if (busy_.exchange(true, std::memory_order_acquire)) return body(context, 0, count);  // another has the helpers
        for (; helpers_ < threads - 1; helpers_++) std::thread([this] { help(); }).detach();
        body_ = body, context_ = context, count_ = count, divisor_ = divisor;
        limit_ = static_cast<unsigned>(threads - 1);
        next_.store(0, std::memory_order_relaxed);
        state_.store(((state_.load(std::memory_order_relaxed) >> SHIFT) + 1) << SHIFT | OPEN);
        if (sleepers_.load() > 0) {
            std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        work();
        state_.fetch_and(~OPEN);
        for (int tries = 0; state_.load(std::memory_order_acquire) & INSIDE; tries++)
            if (tries < 2000) relax();
            else std::this_thread::yield();  // a helper inside may be waiting for this very core
        busy_.store(false, std::memory_order_release);
    }

private:
    // state_: | job number | open | helpers inside |. A helper enters by compare-and-swap while the job is open, so
    // that none can enter, or touch the job's fields, once the caller has closed it and seen nobody inside.
    static constexpr std::uint64_t INSIDE = 0xffff, OPEN = 0x10000;
    static constexpr int SHIFT = 17;
    static constexpr std::chrono::microseconds SPIN{200};

    static Pool*& current() {
        static Pool* pool = new Pool;
        return pool;
    }

    void work() {
        for (i64 begin = next_.load(std::memory_order_relaxed); begin < count_;) {
            i64 end = begin + std::max<i64>(1, (count_ - begin) / divisor_);
            if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
            body_(context_, begin, end);
            begin = next_.load(std::memory_order_relaxed);
        }
    }

    bool is_new(std::uint64_t state, std::uint64_t last) const { return (state & OPEN) && state >> SHIFT != last; }

    void help() {
        for (std::uint64_t last = 0;;) {
            std::uint64_t state = wait_for_job(last);
            last = state >> SHIFT;
            if ((state & INSIDE) >= limit_) continue;
            if (!state_.compare_exchange_strong(state, state + 1, std::memory_order_acquire)) {
                last = 0;  // it changed under us: look again, at this job too
                continue;
            }
            work();
            state_.fetch_sub(1, std::memory_order_release);
        }
    }

    std::uint64_t wait_for_job(std::uint64_t last) {
        std::uint64_t state;
        for (auto start = std::chrono::steady_clock::now(); std::chrono::steady_clock::now() - start < SPIN;)
            for (int i = 0; i < 32; i++, relax())
                if (is_new(state = state_.load(std::memory_order_acquire), last)) return state;
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return is_new(state = state_.load(), last); });
        sleepers_.fetch_sub(1);
        return state;
    }

    alignas(64) std::atomic<std::uint64_t> state_{0};
    alignas(64) std::atomic<i64> next_{0};
    alignas(64) Body body_ = nullptr;
    const void* context_ = nullptr;
    i64 count_ = 0, divisor_ = 1;
    std::atomic<unsigned> limit_{0};
    int helpers_ = 0;
    std::atomic<bool> busy_{false};
    std::atomic<int> sleepers_{0};
    std::mutex mutex_;
    std::condition_variable wake_;
};

// body(begin, end) for parts of [0, count), for work that likes neighbours: long parts first, then shorter ones, down
// to single indices, so that nobody waits long for the last.
template <class Body>
void parallel_ranges(i64 count, int threads, const Body& body) {
    if (threads <= 1 || count <= 1) return body(0, count);
    Pool::instance().run(
        count, threads, 2 * threads,
        [](const void* context, i64 begin, i64 end) { (*static_cast<const Body*>(context))(begin, end); }, &body);
}

// body(i) for i in [0, count), the next index to whoever is free.
template <class Body>
void parallel_for(i64 count, int threads, const Body& body) {
    auto one_by_one = [&](i64 begin, i64 end) {
        for (i64 i = begin; i < end; i++) body(i);
    };
    if (threads <= 1 || count <= 1) return one_by_one(0, count);
    Pool::instance().run(
        count, threads, count,
        [](const void* context, i64 begin, i64 end) {
            (*static_cast<const decltype(one_by_one)*>(context))(begin, end);
        },
        &one_by_one);
}

// Threads worth using for `work` units, of which one thread does `per_wake` in the time that another needs to join.
inline int worthwhile(int threads, i64 work, i64 per_wake) { return work > per_wake ? threads : 1; }

// A thread's own floats, 64-byte aligned, kept from call to call.
class Scratch {
public:
    float* get(i64 count) {
        if (count > capacity_) {
            std::free(data_);
            capacity_ = count + count / 2;
            data_ = static_cast<float*>(std::aligned_alloc(64, ((capacity_ * 4 + 63) / 64) * 64));
            if (data_ == nullptr) std::abort();
        }
        return data_;
    }
    ~Scratch() { std::free(data_); }

private:
    float* data_ = nullptr;
    i64 capacity_ = 0;
};

}  // namespace shoal
