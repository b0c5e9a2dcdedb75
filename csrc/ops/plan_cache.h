// Plans of recent problems. plan() takes one to ten microseconds, at every call of an operator for the same problem.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <vector>

#include "qao/gemm.h"

namespace qao {

// A problem, and the rows of several weights of one x.
struct PlanKey {
  gemm::Problem problem;
  Gpu gpu;
  std::array<int64_t, gemm::kMaxParts> rows;  // -1: none

  PlanKey() : PlanKey({}, {}) {}
  PlanKey(const gemm::Problem& of, const Gpu& on, std::span<const int64_t> rows_of_parts = {}) : problem(of), gpu(on) {
    rows.fill(-1);
    std::ranges::copy(rows_of_parts, rows.begin());
  }
  bool operator==(const PlanKey&) const = default;
  size_t hash() const {
    size_t mixed = 0;
    for (const int64_t part : {problem.m, problem.n, problem.k, problem.group_size, rows[0],
                               static_cast<int64_t>(problem.x), static_cast<int64_t>(problem.weight)}) {
      mixed = (mixed ^ static_cast<size_t>(part)) * 0x9E3779B97F4A7C15u;
      mixed ^= mixed >> 29;
    }
    return mixed;
  }
};

// A plan, and whether there is one: several weights may have none.
struct Planned {
  PlanKey key;
  gemm::Plan plan;
  bool exists = false, filled = false;
};

// The plan of `key`: of this thread's last calls, or what make(Planned*) fills in. A failed make() throws, and nothing
// is kept.
template <typename Make>
Planned planned(const PlanKey& key, const Make& make) {
  constexpr size_t kEntries = 128;
  static thread_local std::vector<Planned> entries(kEntries);
  Planned& entry = entries[key.hash() % kEntries];
  if (entry.filled && entry.key == key) return entry;
  entry = {key, {}, false, false};
  make(&entry);
  entry.filled = true;
  return entry;
}

}  // namespace qao
