// Threads of the CPU kernels: csrc passes torch's pool, tests and benchmarks may pass any other.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

namespace qao::cpu {

struct Threads {
  int count = 1;
  // Calls task(context, i) for every i in [0, count), each on a different thread, and returns when all are done.
  void (*run)(int count, void (*task)(void* context, int index), void* context) = nullptr;

  template <typename Task>
  void for_each(const Task& task) const {
    if (count == 1 || run == nullptr) {
      for (int i = 0; i < count; ++i) task(i);
      return;
    }
    run(count, [](void* context, int i) { (*static_cast<const Task*>(context))(i); }, const_cast<Task*>(&task));
  }
};

// `static`: see numeric.h.
static inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// Whether the calling thread alone is as fast for this many values, at about six values per nanosecond. Waking other
// threads costs more than they save, and on a busy machine every wait for them may cost a scheduler time slice.
static inline bool is_serial(const Threads& threads, int64_t values) {
  constexpr int64_t kWaking = 32768;
  return values * (threads.count - 1) <= kWaking * threads.count;
}

// Calls task(begin, end) on every thread for its part of [0, count). The parts depend only on `count` and the number of
// threads.
template <typename Task>
void split(const Threads& threads, int64_t count, const Task& task) {
  threads.for_each([&](int i) {
    const int64_t begin = count * i / threads.count, end = count * (i + 1) / threads.count;
    if (begin < end) task(begin, end);
  });
}

// Calls task(begin, end) for pieces of [0, count) that threads take dynamically, so that a thread that lost its core
// does not hold up the others. The assignment is nondeterministic: results must not depend on it.
template <typename Task>
void share(const Threads& threads, int64_t count, int64_t piece, const Task& task) {
  std::atomic<int64_t> next{0};
  threads.for_each([&](int) {
    for (int64_t begin; (begin = next.fetch_add(piece, std::memory_order_relaxed)) < count;) {
      task(begin, least(begin + piece, count));
    }
  });
}

// Calls task(i) for every i in [0, count). Threads start with their share as in split(), then take what others have not
// started: results must not depend on the assignment.
template <typename Task>
void share_near(const Threads& threads, int64_t count, const Task& task) {
  const std::unique_ptr<std::atomic<bool>[]> taken(new std::atomic<bool>[static_cast<size_t>(count)]());
  threads.for_each([&](int thread) {
    const int64_t first = count * thread / threads.count;
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (first + i) % count;
      if (!taken[static_cast<size_t>(at)].exchange(true, std::memory_order_relaxed)) task(at);
    }
  });
}

}  // namespace qao::cpu
