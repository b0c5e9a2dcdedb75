// Parameters of the kernels of mainloop_ring_x.cuh, computed by one function for plan() and launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/sm90_skinny/partition.h"
#include "gemm/sm90_skinny/tile.h"
#include "layout/int4.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_skinny {

struct RingXConfig {
  int tokens;  // maximum
  int stages;  // maximum
  int tiles_n, warps, ctas_per_sm, padded_row;
};

template <typename Tile>
constexpr RingXConfig ring_x_config(int stages) {
  return {Tile::kTokens, stages, Tile::kTilesN, Tile::kWarps, Tile::kCtasPerSm, Tile::kPaddedRow};
}

constexpr RingXConfig kRingX[] = {
#define QAO_RING_X(stages, ...) ring_x_config<RingXTile<__VA_ARGS__>>(stages),
#include "gemm/sm90_skinny/tiles_ring_x.inc"
#undef QAO_RING_X
};

// Kernel parameters. An n-tile ("row tile") has 16 rows of W, a K-step 128 columns.
struct RingXParams {
  int row_tiles, more_row_tiles;  // per CTA; the first `more_row_tiles` CTAs have one more
  int steps, more_steps;          // per CTA of a cluster that splits K; the first `more_steps` have one more
  int plain_steps;                // the first `plain_steps` K-steps are whole, and each thread copies 16 bytes per row
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int passes, slots;  // passes over the n-tiles; how many passes' partial sums fit in shared memory at once
  int stages, stage_bytes, scale_offset, x_offset;  // of the ring; offsets of scales/zeros and of x in a stage
  int groups_of_step, group_shift;                  // the first group of K-step s is s * groups_of_step >> group_shift
  int chunk_shift;                    // log2 of the 16-byte chunks of scales and zeros per K-step and n-tile
  int scale_advance;                  // bytes of scales and zeros between two K-steps of a warp
  int columns_of_token, token_shift;  // groups per K-step, or 1; log2 of the tokens in eight MMA columns
  bool zeros, clustered;
};

// Fills in the parameters for `clusters` clusters of `split` CTAs. Returns false if a CTA needs more than
// `shared_limit` bytes.
inline bool ring_x_params(const Problem& problem, const RingXConfig& config, int split, int clusters, int shared_limit,
                          RingXParams* to, int* shared_bytes) {
  RingXParams d{};
  const Walk walk = fill_walk(problem, static_cast<int>(tiles_n(problem.n)), clusters, config.warps, &d);
  d.steps = walk.steps / split, d.more_steps = walk.steps % split;
  d.chunk_shift = log2_of(walk.scale_bytes / 16);
  const int groups_shift = log2_of(d.groups_of_step);
  const bool pairs = !is_float_fp4(problem) && config.tokens == 8 && problem.m << groups_shift <= 8;
  d.columns_of_token = pairs ? d.groups_of_step : 1;
  d.token_shift = pairs ? 3 - groups_shift : 3;
  const bool plain = problem.x_aligned && scale_chunks(config.tiles_n, walk.scale_bytes) <= kPlainChunks;
  d.plain_steps = plain ? static_cast<int>(problem.k / kStepColumns) : 0;
  d.clustered = split > 1;

  // The kernel reads n-tiles past the end as well. The stage reserves room for them with an fp4 weight, so that no
  // other data is written there.
  const int held = is_float_fp4(problem) ? config.tiles_n : std::min(walk.most, config.tiles_n);
  d.passes = passes_over(walk.most, config.tiles_n);
  d.scale_offset = held * kStepBytes;
  d.x_offset = round_up(d.scale_offset + held * walk.scale_bytes, 128);
  d.stage_bytes = d.x_offset + d.tokens * kStepColumns * 2;
  const int slot_bytes = config.warps * d.tokens * d.columns_of_token * config.padded_row * 4;
  for (d.stages = config.stages; d.stages >= 2; --d.stages) {
    const int ring = d.stages * config.warps * d.stage_bytes;
    d.slots = std::min(d.passes, (shared_limit - ring) / slot_bytes);
    // The kernel reads the last stage as if all its n-tiles existed, so shared memory must cover them.
    const int read = ring - d.stage_bytes +
                     std::max(config.tiles_n * kStepBytes, d.scale_offset + config.tiles_n * walk.scale_bytes);
    *shared_bytes = std::max(ring + d.slots * slot_bytes, read);
    if (d.slots >= 1 && *shared_bytes <= shared_limit) {
      *to = d;
      return true;
    }
  }
  return false;
}

// Shared memory per CTA that lets config.ctas_per_sm CTAs share an SM. Each CTA uses 1 KB more than it requests.
inline int ring_x_shared_limit(const RingXConfig& config, int shared_bytes_per_cta) {
  return (shared_bytes_per_cta + 1024) / config.ctas_per_sm - 1024;
}

}  // namespace qao::gemm::sm90_skinny
