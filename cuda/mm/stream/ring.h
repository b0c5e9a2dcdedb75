// How ring.cuh cuts a problem: one definition for plan() and for launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "int4/layout.h"
#include "mm/stream/tile.h"
#include "mm/stream/walk.h"
#include "qao/mm.h"

namespace qao::mm::stream {

struct RingConfig {
  int tokens;  // at most
  int stages;  // at most
  int tiles_n, warps, ctas_per_sm, padded_row;
};

template <typename Tile>
constexpr RingConfig ring_config(int stages) {
  return {Tile::kTokens, stages, Tile::kTilesN, Tile::kWarps, Tile::kCtasPerSm, Tile::kPaddedRow};
}

constexpr RingConfig kRing[] = {
#define QAO_RING(stages, ...) ring_config<RingTile<__VA_ARGS__>>(stages),
#include "mm/stream/ring.inc"
#undef QAO_RING
};

// What the kernel gets. Row tiles have 16 rows of W, K-steps 128 columns.
struct RingParams {
  int row_tiles, more_row_tiles;  // of a CTA; the first `more` CTAs have one more
  int steps, more_steps;          // of a CTA of the cluster that shares row tiles, likewise
  int plain_steps;                // the first so many are whole and fetched by one copy a thread and row
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int passes, slots;  // passes over the row tiles, and how many of them leave their sums in shared memory together
  int stages, stage_bytes, scale_offset, x_offset;  // of the ring; of parameters and x in a stage
  int groups_of_step, group_shift;                  // K-step s begins with group s * groups_of_step >> group_shift
  int chunk_shift;                    // log2 of the 16-byte chunks of parameters that a K-step has per row tile
  int scale_advance;                  // bytes of parameters from a K-step of a warp to its next
  int columns_of_token, token_shift;  // groups of a K-step, or 1; log2 of the tokens of eight columns
  bool zeros, clustered;
};

// For `clusters` clusters of `split` CTAs. False if a CTA would need more than `shared_limit` bytes.
inline bool ring_params(const Problem& problem, const RingConfig& config, int split, int clusters, int shared_limit,
                        RingParams* to, int* shared_bytes) {
  RingParams d{};
  const Walk walk = fill_walk(problem, static_cast<int>(tiles_n(problem.n)), clusters, config.warps, &d);
  d.steps = walk.steps / split, d.more_steps = walk.steps % split;
  d.chunk_shift = log2_of(walk.scale_bytes / 16);
  const int groups_shift = log2_of(d.groups_of_step);
  const bool pairs = !is_float_fp4(problem) && config.tokens == 8 && problem.m << groups_shift <= 8;
  d.columns_of_token = pairs ? d.groups_of_step : 1;
  d.token_shift = pairs ? 3 - groups_shift : 3;
  const bool plain = problem.x_aligned && (config.tiles_n << d.chunk_shift) <= 64;
  d.plain_steps = plain ? static_cast<int>(problem.k / kStepColumns) : 0;
  d.clustered = split > 1;

  // Row tiles that do not exist are read like others. An fp4 weight has room for them in the stage, so that nobody
  // writes there meanwhile.
  const int held = is_float_fp4(problem) ? config.tiles_n : std::min(walk.most, config.tiles_n);
  d.passes = passes_over(walk.most, config.tiles_n);
  d.scale_offset = held * kStepBytes;
  d.x_offset = round_up(d.scale_offset + held * walk.scale_bytes, 128);
  d.stage_bytes = d.x_offset + d.tokens * kStepColumns * 2;
  const int slot_bytes = config.warps * d.tokens * d.columns_of_token * config.padded_row * 4;
  for (d.stages = config.stages; d.stages >= 2; --d.stages) {
    const int ring = d.stages * config.warps * d.stage_bytes;
    d.slots = std::min(d.passes, (shared_limit - ring) / slot_bytes);
    // The last stage is read as if all its row tiles existed, so that memory must be there.
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

// Shared memory that a CTA may have so that config.ctas_per_sm of them fit on an SM; each costs 1 KB more.
inline int ring_shared_limit(const RingConfig& config, int shared_bytes_per_cta) {
  return (shared_bytes_per_cta + 1024) / config.ctas_per_sm - 1024;
}

}  // namespace qao::mm::stream
