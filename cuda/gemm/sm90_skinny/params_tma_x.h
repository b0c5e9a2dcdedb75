// Parameters of the kernels of mainloop_tma_x.cuh, computed by one function for plan() and launch().
#pragma once

#include "common/integers.h"
#include "gemm/sm90_skinny/partition.h"
#include "gemm/sm90_skinny/tile.h"
#include "layout/int4.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_skinny {

struct TmaXConfig {
  int tokens;  // maximum
  int tiles_n, warps, stages;
};

template <typename Tile>
constexpr TmaXConfig tma_x_config() {
  return {Tile::kTokens, Tile::kTilesN, Tile::kWarps, Tile::kStages};
}

constexpr TmaXConfig kTmaX[] = {
#define QAO_TMA_X(...) tma_x_config<TmaXTile<__VA_ARGS__>>(),
#include "gemm/sm90_skinny/tiles_tma_x.inc"
#undef QAO_TMA_X
};

// Bytes of 16-bit scales and zeros per group and n-tile.
constexpr int tma_x_group_bytes(bool zeros) { return (zeros ? 2 : 1) * kTileN * 2; }
// Copies that straddle 128-byte lines are slower.
constexpr int tma_x_stage_bytes(int tiles_n, bool zeros) {
  return round_up(tiles_n * (kStepBytes + tma_x_group_bytes(zeros)), 128);
}

// Kernel parameters. An n-tile ("row tile") has 16 rows of W, a K-step kStepColumns columns.
struct TmaXParams {
  int row_tiles, more_row_tiles;  // per CTA; the first `more_row_tiles` CTAs have one more
  int passes;                     // over the n-tiles
  int steps;                      // K-steps
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int ring_offset, barriers_offset, places_offset;  // in shared memory, after x
  int groups_of_step, group_shift;                  // K-step s lies in group s >> group_shift
  int scale_advance;                                // bytes of scales and zeros between two K-steps of a warp
  bool zeros;
};

// Returns false if K is not a multiple of a K-step, if a group is smaller than a K-step, if scales are wider than 16
// bits, if TMA cannot read x, or if a CTA needs more than `shared_limit` bytes.
inline bool tma_x_params(const Problem& problem, const TmaXConfig& config, int ctas, int shared_limit, TmaXParams* to,
                         int* shared_bytes) {
  if (size_of(problem.scale_dtype) != 2 || !problem.x_aligned) return false;
  if (tiles_k(problem.k) % 2 != 0) return false;
  TmaXParams d{};
  const Walk walk = fill_walk(problem, static_cast<int>(tiles_n(problem.n)), ctas, config.warps, &d);
  if (d.groups_of_step > 1) return false;
  d.passes = passes_over(walk.most, config.tiles_n);
  d.steps = walk.steps;
  const int step_x = kStepBoxes * config.tokens * kBoxRowBytes;
  if (d.steps > shared_limit / step_x) return false;

  d.ring_offset = d.steps * step_x;
  d.barriers_offset =
      d.ring_offset + config.warps * config.stages * tma_x_stage_bytes(config.tiles_n, problem.has_zeros);
  d.places_offset = d.barriers_offset + d.steps * 8;
  *shared_bytes = d.places_offset + config.warps * 4;
  *to = d;
  return *shared_bytes <= shared_limit;
}

}  // namespace qao::gemm::sm90_skinny
