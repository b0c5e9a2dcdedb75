// What lies where in the workspace, and how large x in shared memory is. One definition for plan(), which sizes them,
// and launch(), which fills them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/float32.h"
#include "common/integers.h"
#include "mm8/tile.h"
#include "qao/mm8.h"

namespace qao::mm8 {

struct Workspace {
  int64_t partials = -1;    // float32 [split_k, m, n]; -1: the kernel writes y itself
  int64_t parts = -1;       // bfloat16 [m, 3, part_stride]: float32 x, split
  int64_t part_stride = 0;  // elements
  int64_t x_sums = -1;      // float32 [m, groups]: of that x, for the zero points of an int4 weight
  int64_t bytes = 0;
};

inline bool is_split(const Problem& problem) {
  return problem.x == Format::kFloat && problem.x_dtype == DType::kFloat32;
}

inline Workspace workspace_of(const Problem& problem, int split_k) {
  Workspace workspace;
  const auto take = [&](int64_t bytes) {
    const int64_t at = workspace.bytes;
    workspace.bytes += round_up(bytes, 256);
    return at;
  };
  if (split_k > 1) workspace.partials = take(4 * split_k * problem.m * problem.n);
  if (is_split(problem)) {
    workspace.part_stride = round_up(problem.k, 8);
    workspace.parts = take(2 * problem.m * kFloat32Parts * workspace.part_stride);
    if (problem.has_zeros) workspace.x_sums = take(4 * problem.m * problem.groups());
  }
  return workspace;
}

// Groups of an int4 weight in a K-tile.
inline int tile_groups_of(const Problem& problem) {
  return problem.groups() == 1 ? 1 : static_cast<int>(std::max<int64_t>(1, kTileK / problem.group_size));
}

inline ResidentX resident_of(const Problem& problem) {
  const int k_tiles = static_cast<int>((problem.k + kTileK - 1) / kTileK);
  const int parameters = problem.weight == Format::kInt4             ? tile_groups_of(problem)
                         : problem.weight_scaling == Scaling::kBlock ? 1
                                                                     : 0;
  return {static_cast<int>(problem.m), k_tiles, parameters};
}

inline int64_t weight_bytes(const Problem& problem) {
  return problem.weight == Format::kInt4 ? int4::weight_bytes(problem.n, problem.k) : problem.n * problem.k;
}

// Of a row of floats that the kernel quantises, in shared memory.
inline int float_row_bytes(const Problem& problem) {
  return static_cast<int>(round_up(problem.k, kTileK) * size_of(problem.x_dtype));
}

}  // namespace qao::mm8
