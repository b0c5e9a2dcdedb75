// Distribution of packing and N-tiles over threads.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>

#include "cpu/parallel.h"

namespace qao::cpu {

// Distributes the N-tiles of a GEMM with this many multiplications among the threads of one for_each(): as split(), or
// for long GEMMs in pieces of decreasing length. A piece is half of an equal share of the rest, so that threads finish
// together even if one started late or lost its core. Pieces are large enough for the kernels' prefetch
// (x86/weight_stream.h) and for their blocks of N-tiles.
class TileShares {
 public:
  TileShares(int threads, int64_t tiles, int64_t multiplications) : threads_(threads), tiles_(tiles) {
    constexpr int64_t kPieceWork = int64_t{1} << 24, kPieces = 4;  // 25 to 400 us of a core; pieces per thread
    const int64_t shortest = divide_up(kPieceWork, multiplications / tiles * kBlock + 1) * kBlock;
    if (threads > 1 && tiles >= kPieces * shortest * threads) shortest_ = shortest;
  }

  // Calls task(begin, end) for each piece of this thread.
  template <typename Task>
  void run(int thread, const Task& task) {
    if (shortest_ == 0) {
      const int64_t begin = tiles_ * thread / threads_, end = tiles_ * (thread + 1) / threads_;
      if (begin < end) task(begin, end);
      return;
    }
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < tiles_) {
      const int64_t half_share = (tiles_ - begin) / (2 * threads_) / kBlock * kBlock;
      const int64_t end = least(begin + (half_share > shortest_ ? half_share : shortest_), tiles_);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      task(begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
  }

 private:
  static constexpr int64_t kBlock = 8;  // tiles

  int threads_;
  int64_t tiles_, shortest_ = 0;  // 0: every thread has a fixed part
  std::atomic<int64_t> next_{0};
};

// Calls task(begin, end) for the N-tiles of such a GEMM.
template <typename Task>
void split_tiles(const Threads& threads, int64_t tiles, int64_t multiplications, const Task& task) {
  TileShares shares(threads.count, tiles, multiplications);
  threads.for_each([&](int thread) { shares.run(thread, task); });
}

// Yields to the sibling hardware thread.
static inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A step of the threads of one for_each(), which other steps may follow: threads take pieces of [0, count) dynamically.
// A thread that has not started does not hold up the others.
class Step {
 public:
  Step(int threads, int64_t count) : count_(count), piece_(divide_up(count, kPieces * threads)) {}

  // Calls task(begin, end) until nothing is left, then waits until all of it is done. A task must not throw: others
  // wait.
  template <typename Task>
  void run(const Task& task) {
    if (count_ == 0) return;
    for (int64_t begin; (begin = next_.fetch_add(piece_, std::memory_order_relaxed)) < count_;) {
      const int64_t end = least(begin + piece_, count_);
      task(begin, end);
      done_.fetch_add(end - begin, std::memory_order_release);
    }
    for (int spins = 0; done_.load(std::memory_order_acquire) < count_; ++spins) {
      spins < kSpins ? pause() : std::this_thread::yield();
    }
  }

 private:
  static constexpr int64_t kPieces = 4;  // per thread
  static constexpr int kSpins = 128;     // before a waiting thread yields its core

  int64_t count_, piece_;
  std::atomic<int64_t> next_{0}, done_{0};
};

}  // namespace qao::cpu
