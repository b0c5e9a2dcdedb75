// Per-thread memory that kernels reuse between calls.
#pragma once

#include <cstdint>

namespace qao::cpu {

enum class Scratch : int {
  kActivations = 0,
  kPanel = 1,
  kSums = 2,
  kQuantized = 3,
  kOutliers = 4,
  kGroups = 5,
  kWideRows = 6,
  kRow = 7
};

// At least `bytes` bytes, 64-byte aligned, contents undefined. Valid until this thread requests the same kind again.
void* scratch(Scratch kind, int64_t bytes);

}  // namespace qao::cpu
