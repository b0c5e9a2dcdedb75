// Partition of a problem shared by all skinny-GEMM kernels.
// CTAs own runs of n-tiles, warps take K-steps.
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/problem.h"
#include "gemm/sm90_skinny/tile.h"

namespace qao::gemm::sm90_skinny {

// The result of fill_walk().
struct Walk {
  int steps;        // K-steps that cover K
  int most;         // n-tiles of the CTA with the most
  int scale_bytes;  // scales and zeros per K-step and n-tile
};

// Fills in the fields that every `Cut` has: divides `row_tiles` n-tiles among `ctas` CTAs, and K-steps among the warps
// of a CTA.
template <typename Cut>
Walk fill_walk(const Problem& problem, int row_tiles, int ctas, int warps, Cut* cut) {
  cut->row_tiles = row_tiles / ctas, cut->more_row_tiles = row_tiles % ctas;
  cut->tokens = static_cast<int>(problem.m);
  cut->row_tile_bytes = tiles_k(problem.k) * kTileBytes;
  cut->row_tile_scale_bytes = scale_rows(problem) * group_bytes(problem);
  cut->zeros = problem.has_zeros;
  cut->groups_of_step = 1, cut->group_shift = 30, cut->scale_advance = 0;  // one group for all steps
  if (problem.group_size < problem.k) {
    cut->groups_of_step = std::max(kStepColumns / static_cast<int>(problem.group_size), 1);
    cut->group_shift = log2_of(problem.group_size / kStepColumns);
    cut->scale_advance = (warps * cut->groups_of_step >> cut->group_shift) * group_bytes(problem);
  }
  return {static_cast<int>((tiles_k(problem.k) + 1) / 2), cut->row_tiles + (cut->more_row_tiles > 0),
          cut->groups_of_step * group_bytes(problem)};
}

// Number of passes of `tiles_n` n-tiles.
inline int passes_over(int row_tiles, int tiles_n) { return (row_tiles + tiles_n - 1) / tiles_n; }

}  // namespace qao::gemm::sm90_skinny
