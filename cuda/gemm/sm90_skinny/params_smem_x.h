// Parameters of the kernels of mainloop_smem_x.cuh, computed by one function for plan() and launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/sm90_skinny/partition.h"
#include "gemm/sm90_skinny/tile.h"
#include "layout/int4.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_skinny {

constexpr int kSmemXTokens = 8;

struct SmemXConfig {
  int tokens;  // maximum
  int tiles_n, warps, stages, ctas_per_sm, padded_row;
};

template <typename Tile>
constexpr SmemXConfig smem_x_config() {
  return {kSmemXTokens, Tile::kTilesN, Tile::kWarps, Tile::kStages, Tile::kCtasPerSm, Tile::kPaddedRow};
}

constexpr SmemXConfig kSmemX[] = {
#define QAO_SMEM_X(...) smem_x_config<SmemXTile<__VA_ARGS__>>(),
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};
constexpr int kZeroBytes = 16;  // a block of zeros after x in shared memory

// Kernel parameters. An n-tile ("row tile") has 16 rows of W, a K-step kStepColumns columns.
struct SmemXParams {
  int row_tiles, more_row_tiles;  // per CTA, counted in pairs if gated; the first `more_row_tiles` CTAs have one more
  int normed, gated;              // 0 or 1. gated: a pass computes one n-tile of gate and one of up
  int steps, plain_steps;         // the first `plain_steps` K-steps are whole, and each lane copies 16 bytes per K-tile
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int64_t next_tile_bytes, next_tile_scale_bytes;  // between the n-tiles of a pass
  int64_t next_pass_bytes, next_pass_scale_bytes;  // between passes
  int passes, slots;  // passes over the n-tiles; how many passes' partial sums fit in shared memory at once
  int zeros_offset, ring_offset, factors_offset, partials_offset, stage_bytes;  // offsets in shared memory, after x
  int groups_of_step, group_shift;  // the first group of K-step s is s * groups_of_step >> group_shift
  int chunk_shift;                  // log2 of the 16-byte chunks of scales and zeros per K-step and n-tile
  int scale_advance;                // bytes of scales and zeros between two K-steps of a warp
  bool zeros;
};

// Weights that share x. A pass computes n-tiles of one of them, or one n-tile of gate and one of up.
struct MergedParts {
  struct Part {
    const uint8_t *weight, *scales;
    const void* bias;
    void* y;
    int n, row_tiles;
  };
  int count;                  // of the parts that passes go over: all, or only the first if gated
  int first_pass[kMaxParts];  // of each part
  Part part[kMaxParts];
};

// Passes over one weight of `n` out_features. If gated, those over gate serve up too.
inline int passes_over_part(int64_t n, bool gated, int tiles_n) {
  return passes_over(static_cast<int>(int4::tiles_n(n)), tiles_n >> gated);
}

// Returns false if a K-step has more groups than the columns of an MMA or the lanes that copy scales can handle, or if
// a CTA needs more than `shared_limit` bytes. `passes`: those over several weights, which row_tiles then counts instead
// of n-tiles, or 0.
inline bool smem_x_params(const Problem& problem, const SmemXConfig& config, int ctas, int shared_limit,
                          SmemXParams* to, int* shared_bytes, int passes = 0) {
  SmemXParams d{};
  d.normed = problem.normed, d.gated = problem.gated;
  const int row_tiles = passes > 0 ? passes : static_cast<int>(tiles_n(problem.n)) >> d.gated;
  const Walk walk = fill_walk(problem, row_tiles, ctas, config.warps, &d);
  d.steps = walk.steps;
  const int distance = problem.gated ? row_tiles : 1;
  d.next_tile_bytes = distance * d.row_tile_bytes, d.next_tile_scale_bytes = distance * d.row_tile_scale_bytes;
  const int of_pass = config.tiles_n >> d.gated;
  d.next_pass_bytes = of_pass * d.row_tile_bytes, d.next_pass_scale_bytes = of_pass * d.row_tile_scale_bytes;
  d.chunk_shift = log2_of(walk.scale_bytes / 16);
  if (d.tokens * d.groups_of_step > kSmemXTokens || scale_chunks(config.tiles_n, walk.scale_bytes) > kSmemXChunks)
    return false;
  d.plain_steps = static_cast<int>(problem.k / kStepColumns);

  const int64_t x_bytes = static_cast<int64_t>(d.steps) * d.tokens * kTokenBytes;
  if (x_bytes > shared_limit) return false;
  d.zeros_offset = static_cast<int>(x_bytes);
  const int slot_bytes = config.warps * d.tokens * config.padded_row * 4;
  d.passes = passes > 0 ? walk.most : passes_over(walk.most << d.gated, config.tiles_n);
  // Copies that straddle 128-byte lines are slower.
  d.stage_bytes = round_up(config.tiles_n * (kStepBytes + walk.scale_bytes), 128);
  d.ring_offset = round_up(d.zeros_offset + kZeroBytes, 128);
  d.factors_offset = d.ring_offset + config.warps * config.stages * d.stage_bytes;
  const int units = problem.normed ? kSmemXTokens + d.steps * d.tokens : 0;
  d.partials_offset = d.factors_offset + (units + 3) / 4 * 16;
  d.slots = std::min(d.passes, (shared_limit - d.partials_offset) / slot_bytes);
  *shared_bytes = d.partials_offset + d.slots * slot_bytes;
  *to = d;
  return d.slots >= 1;
}

}  // namespace qao::gemm::sm90_skinny
