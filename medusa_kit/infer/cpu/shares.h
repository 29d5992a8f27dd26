// How threads divide the units of a phase. Each has equally many of its own, and one that is done
// takes over units of the others, so that none waits long for a thread that something held up.
#pragma once
#include <atomic>
#include <vector>

#include "pool.h"

class Shares {
  public:
    Shares(int64_t phases, int threads) : threads(threads), own(phases * threads), phase_of(threads) {}

    // Calls f(from, to) for this thread's units of the next phase: most of its own at once, then fewer,
    // `least` in the end. All threads go through the same phases. An atomic operation waits for all
    // that the thread has written, so there are few.
    template <class F> void deal(int id, int active, int64_t units, int64_t least, F f) {
        Count* taken = &own[phase_of[id].count++ * threads];
        for (int turn = 0; turn < active; ++turn) {
            const int owner = (id + turn) % active;
            const int64_t first = units * owner / active, end = units * (owner + 1) / active;
            std::atomic<int64_t>& count = taken[owner].count;
            int64_t at = count.load(std::memory_order_relaxed);
            while (first + at < end) {
                const int64_t left = end - first - at, share = at == 0 ? left * 3 / 4 : left / 2;
                const int64_t size = std::min(left, std::max(least, turn == 0 ? share : left / 4));
                if (!count.compare_exchange_weak(at, at + size, std::memory_order_relaxed)) continue;
                f(first + at, first + at + size);
                at = count.load(std::memory_order_relaxed);
            }
        }
    }

  private:
    struct alignas(64) Count { std::atomic<int64_t> count{0}; };
    const int threads;
    std::vector<Count> own;  // units taken of each thread's, for each phase
    std::vector<Count> phase_of;  // of each thread
};
