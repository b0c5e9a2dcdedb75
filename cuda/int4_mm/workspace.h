// What lies where in the workspace. One definition for plan(), which sizes it, and launch(), which fills it.
#pragma once

#include <cstdint>

#include "common/float32.h"
#include "common/integers.h"
#include "qao/int4_mm.h"

namespace qao::int4_mm {

struct Workspace {
  int64_t partials = -1;    // float32 [split_k, m, n]; -1: the kernel writes y itself
  int64_t parts = -1;       // bfloat16 [m, 3, part_stride]: float32 x, split
  int64_t group_sums = -1;  // float32 [m, groups] sums of float32 x, for the zero points
  int64_t part_stride = 0;
  int64_t bytes = 0;
};

inline Workspace workspace_of(const Problem& problem, int split_k) {
  Workspace workspace;
  const auto take = [&](int64_t bytes) {
    const int64_t at = workspace.bytes;
    workspace.bytes += round_up(bytes, 256);
    return at;
  };
  const bool split_x = problem.x_dtype == DType::kFloat32;
  const bool correct_zeros = split_x && problem.has_zeros;
  if (split_k > 1 || correct_zeros) workspace.partials = take(4 * split_k * problem.m * problem.n);
  if (split_x) {
    workspace.part_stride = round_up(problem.k, 8);
    workspace.parts = take(2 * problem.m * kFloat32Parts * workspace.part_stride);
  }
  if (correct_zeros) workspace.group_sums = take(4 * problem.m * problem.groups());
  return workspace;
}

}  // namespace qao::int4_mm
