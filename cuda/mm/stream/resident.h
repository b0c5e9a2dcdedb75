// How resident.cuh cuts a problem: one definition for plan() and for launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "int4/layout.h"
#include "mm/stream/tile.h"
#include "mm/stream/walk.h"
#include "qao/mm.h"

namespace qao::mm::stream {

constexpr int kResidentTokens = 8;

struct ResidentConfig {
  int tokens;  // at most
  int tiles_n, warps, stages, ctas_per_sm, padded_row;
};

template <typename Tile>
constexpr ResidentConfig resident_config() {
  return {kResidentTokens, Tile::kTilesN, Tile::kWarps, Tile::kStages, Tile::kCtasPerSm, Tile::kPaddedRow};
}

constexpr ResidentConfig kResident[] = {
#define QAO_RESIDENT(...) resident_config<ResidentTile<__VA_ARGS__>>(),
#include "mm/stream/resident.inc"
#undef QAO_RESIDENT
};
constexpr int kZeroBytes = 16;  // of zeros, behind x in shared memory

// What the kernel gets. Row tiles have 16 rows of W, K-steps kStepColumns columns.
struct ResidentParams {
  int row_tiles, more_row_tiles;  // of a CTA, pairs of them if gated; the first `more` CTAs have one more
  int normed, gated;              // 0 or 1. gated: the row tiles of a pass are one of gate and that of up
  int steps, plain_steps;         // K-steps; the first `plain` are whole and fetched by one copy a lane and K-tile
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int64_t next_tile_bytes, next_tile_scale_bytes;  // from a row tile of a pass to the next
  int64_t next_pass_bytes, next_pass_scale_bytes;  // from a pass to the next
  int passes, slots;  // passes over the row tiles, and how many of them leave their sums in shared memory together
  int zeros_offset, ring_offset, factors_offset, partials_offset, stage_bytes;  // in shared memory, behind x
  int groups_of_step, group_shift;  // K-step s begins with group s * groups_of_step >> group_shift
  int chunk_shift;                  // log2 of the 16-byte chunks of parameters of a K-step and row tile
  int scale_advance;                // bytes of parameters from a K-step of a warp to its next
  bool zeros;
};

// False if a K-step has too many groups for the columns of a product or for the lanes that copy their parameters, or if
// a CTA would need more than `shared_limit` bytes.
inline bool resident_params(const Problem& problem, const ResidentConfig& config, int ctas, int shared_limit,
                            ResidentParams* to, int* shared_bytes) {
  ResidentParams d{};
  d.normed = problem.normed, d.gated = problem.gated;
  const int row_tiles = static_cast<int>(tiles_n(problem.n)) >> d.gated;
  const Walk walk = fill_walk(problem, row_tiles, ctas, config.warps, &d);
  d.steps = walk.steps;
  const int distance = problem.gated ? row_tiles : 1;
  d.next_tile_bytes = distance * d.row_tile_bytes, d.next_tile_scale_bytes = distance * d.row_tile_scale_bytes;
  const int of_pass = config.tiles_n >> d.gated;
  d.next_pass_bytes = of_pass * d.row_tile_bytes, d.next_pass_scale_bytes = of_pass * d.row_tile_scale_bytes;
  d.chunk_shift = log2_of(walk.scale_bytes / 16);
  if (d.tokens * d.groups_of_step > kResidentTokens || config.tiles_n << d.chunk_shift > 32) return false;
  d.plain_steps = static_cast<int>(problem.k / kStepColumns);

  const int64_t x_bytes = static_cast<int64_t>(d.steps) * d.tokens * kTokenBytes;
  if (x_bytes > shared_limit) return false;
  d.zeros_offset = static_cast<int>(x_bytes);
  const int slot_bytes = config.warps * d.tokens * config.padded_row * 4;
  d.passes = passes_over(walk.most << d.gated, config.tiles_n);
  // Copies that lie across lines of 128 bytes take longer.
  d.stage_bytes = round_up(config.tiles_n * (kStepBytes + walk.scale_bytes), 128);
  d.ring_offset = round_up(d.zeros_offset + kZeroBytes, 128);
  d.factors_offset = d.ring_offset + config.warps * config.stages * d.stage_bytes;
  const int units = problem.normed ? kResidentTokens + d.steps * d.tokens : 0;
  d.partials_offset = d.factors_offset + (units + 3) / 4 * 16;
  d.slots = std::min(d.passes, (shared_limit - d.partials_offset) / slot_bytes);
  *shared_bytes = d.partials_offset + d.slots * slot_bytes;
  *to = d;
  return d.slots >= 1;
}

}  // namespace qao::mm::stream
