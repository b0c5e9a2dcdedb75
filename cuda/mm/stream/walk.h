// How all streaming bodies cut a problem: CTAs own runs of row tiles, warps take K-steps.
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "mm/problem.h"
#include "mm/stream/tile.h"

namespace qao::mm::stream {

// What fill_walk() returns.
struct Walk {
  int steps;        // K-steps of all columns
  int most;         // row tiles of the CTA that has most
  int scale_bytes;  // of a K-step's parameters of a row tile
};

// Fills in what every `Cut` has: `row_tiles` of W are shared out among so many CTAs, K-steps among the warps of one.
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

// Passes of `tiles_n` row tiles.
inline int passes_over(int row_tiles, int tiles_n) { return (row_tiles + tiles_n - 1) / tiles_n; }

}  // namespace qao::mm::stream
