// A few threads that run one function together and wait for each other at barriers.
// Not OpenMP's: torch's OpenMP threads keep spinning beside ours, and a step has some 200 barriers.
#pragma once
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <pthread.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
inline void cpu_relax() { _mm_pause(); }
#else
inline void cpu_relax() {}
#endif

inline double seconds() {
    using namespace std::chrono;
    return duration<double>(steady_clock::now().time_since_epoch()).count();
}

// Detects that other programs use our cores. A barrier then costs a time slice instead of a
// microsecond, and one thread alone is faster than several that wait for each other.
class Contention {
  public:
    bool present() const { return seconds() < until_; }
    // A run waited long: all threads are tried again after a pause, a longer one each time.
    void waited() {
        if (++strikes_ < 2) return;
        until_ = seconds() + pause_;
        pause_ = std::min(2 * pause_, 4.0);
    }
    void went_well() { strikes_ = 0; pause_ = 0.1; }

  private:
    double until_ = 0, pause_ = 0.1;
    int strikes_ = 0;
};

// The threads of a run. The caller's is the first, and may go on alone after a barrier.
// Callers from several threads take turns, except in a pool of one, which shares nothing.
class Pool {
  public:
    static constexpr int SPINS = 4000;  // polls before the core is yielded
    static constexpr double PATIENCE = 3e-4, SHARE = 0.5;  // longest wait: seconds + share of the run
    // Seconds for which workers look out for the next run before they sleep. Waking one takes as long
    // as twenty barriers, and between two steps of a text lie some 0.4 ms.
    static constexpr double BRIEFLY = 6e-5, BETWEEN_STEPS = 1e-3;

    explicit Pool(int size) : size_(size) {
        for (int id = 1; id < size; ++id) workers_.emplace_back([this, id] { work(id); });
    }
    ~Pool() {
        { std::lock_guard<std::mutex> lock(mutex_); stopping_ = true; ++round_; }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }

    // The number of threads that run since the last barrier: the same for all that passed it.
    int active() const { return active_; }

    // Runs body(id) in all threads, or in this one alone where other programs use the cores.
    // `look_out`: see above; long where no other library's threads compute meanwhile.
    void run(const std::function<void(int)>& body, double look_out = BRIEFLY) {
        if (size_ == 1) return body(0);
        std::lock_guard<std::mutex> one_caller(callers_);
        active_ = contention_.present() ? 1 : size_;
        if (active_ == 1) return body(0);
        start_ = seconds();
        waited_ = 0;
        done_.store(0, std::memory_order_relaxed);
        { std::lock_guard<std::mutex> lock(mutex_); body_ = &body; look_out_ = look_out; ++round_; }
        wake_.notify_all();
        body(0);
        const bool alone = active_ == 1;
        const double before = seconds();
        for (int spin = 0; done_.load(std::memory_order_acquire) < size_ - 1; ++spin)
            spin < SPINS ? cpu_relax() : std::this_thread::yield();
        waited_ += seconds() - before;
        alone || too_long() ? contention_.waited() : contention_.went_well();
    }

    // `may_leave`: thread 0 goes on alone after this barrier if it has waited too long so far.
    void barrier(int id, bool may_leave = false) {
        if (active_ == 1) return;
        const int turn = turn_.load(std::memory_order_relaxed);
        const bool leaving = id == 0 && may_leave && too_long();
        if (leaving) next_active_.store(1, std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            active_ = next_active_.exchange(size_, std::memory_order_relaxed);
            arrived_.store(0, std::memory_order_relaxed);
            turn_.store(turn + 1, std::memory_order_release);
            return;
        }
        const double before = id == 0 ? seconds() : 0;
        for (int spin = 0; turn_.load(std::memory_order_acquire) == turn; ++spin)
            spin < SPINS ? cpu_relax() : std::this_thread::yield();
        if (id == 0) waited_ += seconds() - before;
    }

  private:
    bool too_long() const { return waited_ > PATIENCE + SHARE * (seconds() - start_); }

    void work(int id) {
        int seen = 0;
        double look_out = 0;
        while (true) {
            for (const double from = seconds(); round_.load(std::memory_order_acquire) == seen && seconds() - from < look_out;)
                for (int spin = 0; spin < 32 && round_.load(std::memory_order_relaxed) == seen; ++spin) cpu_relax();
            std::unique_lock<std::mutex> lock(mutex_);
            wake_.wait(lock, [&] { return round_.load() != seen; });
            seen = round_.load();
            if (stopping_) return;
            const auto* body = body_;
            look_out = look_out_;
            lock.unlock();
            (*body)(id);
            done_.fetch_add(1, std::memory_order_release);
        }
    }

    const int size_;
    int active_ = 1;
    double start_ = 0, waited_ = 0;
    Contention contention_;
    std::vector<std::thread> workers_;
    std::mutex callers_, mutex_;
    std::condition_variable wake_;
    const std::function<void(int)>* body_ = nullptr;
    double look_out_ = 0;
    std::atomic<int> round_{0}, arrived_{0}, turn_{0}, done_{0}, next_active_{size_};
    bool stopping_ = false;
};

// The pools of this process, by their number of threads.
struct Pools {
    std::mutex mutex;
    std::map<int, std::unique_ptr<Pool>> by_size;
};

inline Pools*& pools() {
    static Pools* all = [] {
#if !defined(_WIN32)
        // A forked child has none of the threads, and one of them may have held a lock. So the child
        // starts with pools of its own and never touches the old ones.
        pthread_atfork(nullptr, nullptr, [] { pools() = new Pools; });
#endif
        return new Pools;
    }();
    return all;
}

inline Pool& pool(int threads) {
    Pools& all = *pools();
    std::lock_guard<std::mutex> lock(all.mutex);
    auto& found = all.by_size[threads];
    if (!found) found.reset(new Pool(threads));
    return *found;
}
