// Size of a ResidentX in shared memory, shared by plan() and launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {

// Columns of a K-tile, and groups of a 4-bit weight in it.
inline int tile_columns(const Problem& problem) {
  return OperandBytes{problem.x == Format::kFloat ? 2 : 1, problem.weight}.columns();
}
inline int tile_groups_of(const Problem& problem) {
  const int64_t columns = tile_columns(problem);
  return problem.groups() == 1 ? 1 : static_cast<int>(std::max<int64_t>(1, columns / problem.group_size));
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
