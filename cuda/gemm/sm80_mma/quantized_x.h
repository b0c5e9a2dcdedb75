// Size of a ResidentX in shared memory, shared by plan() and launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {

// Groups of an int4 weight per K-tile.
inline int tile_groups_of(const Problem& problem) {
  return problem.groups() == 1 ? 1 : static_cast<int>(std::max<int64_t>(1, kTileK / problem.group_size));
}

inline ResidentX resident_of(const Problem& problem) {
  const int k_tiles = static_cast<int>((problem.k + kTileK - 1) / kTileK);
  const int parameters = problem.weight == Format::kInt4 ? tile_groups_of(problem) : has_blocks(problem) ? 1 : 0;
  return {static_cast<int>(problem.m), k_tiles, parameters};
}

// Bytes in shared memory of a row of x before quantization.
inline int float_row_bytes(const Problem& problem) {
  return static_cast<int>(round_up(problem.k, kTileK) * size_of(problem.x_dtype));
}

}  // namespace qao::gemm::sm80_mma
