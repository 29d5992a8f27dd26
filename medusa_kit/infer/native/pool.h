// A few threads that run one function together and meet at barriers.
// OpenMP's would do, but the pool torch brings spins beside ours, and a step meets some 200 times.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
inline void breathe() { _mm_pause(); }
#else
inline void breathe() {}
#endif

class Pool {
  public:
    // Looks for `patience` rounds before it gives its core away: the other thread may need it.
    static constexpr int SPINS = 4000;

    explicit Pool(int size) : size_(size) {
        for (int id = 1; id < size; ++id) workers_.emplace_back([this, id] { work(id); });
    }
    ~Pool() {
        { std::lock_guard<std::mutex> lock(mutex_); stopping_ = true; ++round_; }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    int size() const { return size_; }

    // Every thread, this one too, runs body(id); returns when all have.
    void run(const std::function<void(int)>& body) {
        if (size_ > 1) {
            { std::lock_guard<std::mutex> lock(mutex_); body_ = &body; ++round_; }
            wake_.notify_all();
        }
        body(0);
        barrier();
    }

    void barrier() {
        if (size_ == 1) return;
        const int turn = turn_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        for (int spin = 0; turn_.load(std::memory_order_acquire) == turn; ++spin)
            spin < SPINS ? breathe() : std::this_thread::yield();
    }

  private:
    void work(int id) {
        int seen = 0;
        while (true) {
            for (int spin = 0; spin < SPINS && round_.load(std::memory_order_acquire) == seen; ++spin) breathe();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return round_.load() != seen; });
            seen = round_.load();
            if (stopping_) return;
            const auto* body = body_;
            lock.unlock();
            (*body)(id);
            barrier();
        }
    }

    const int size_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* body_ = nullptr;
    std::atomic<int> round_{0}, arrived_{0}, turn_{0};
    bool stopping_ = false;
};

// Pieces of a phase, handed out as threads ask: a thread that was held up takes fewer.
struct Shares {
    std::atomic<int> next{0};
    bool take(int total, int& index) { return (index = next.fetch_add(1, std::memory_order_relaxed)) < total; }
};
