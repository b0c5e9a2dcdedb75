// How the body for 9 to 16 tokens cuts a problem: one definition for plan() and for launch().
#pragma once

#include <algorithm>
#include <numeric>

#include "common/integers.h"
#include "int4_mm/layout.h"
#include "int4_mm/tile.h"
#include "qao/int4_mm.h"

namespace qao::int4_mm {

struct BatchConfig {
  int64_t max_m;
  int tiles_n, stages, warps, helpers;
};

template <typename Tile>
constexpr BatchConfig batch_config() {
  return {Tile::kTokens, Tile::kTilesN, Tile::kStages, Tile::kWarps, Tile::kHelpers};
}

constexpr BatchConfig kBatch[] = {
#define QAO_BATCH(...) batch_config<BatchTile<__VA_ARGS__>>(),
#include "int4_mm/batch.inc"
#undef QAO_BATCH
};

// What the kernel gets. Row tiles have 16 rows of W, K-steps kStepColumns columns.
struct BatchParams {
  int row_tiles, more_row_tiles;   // of a cluster; the first `more` have one more
  int steps, more_steps;           // of a CTA of the cluster, likewise
  int plain_steps, plain_x_steps;  // the first so many are whole, and copied 16 bytes at a time
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int64_t warp_tile_bytes;          // of weights, from a row tile of a warp to its next
  int warps_n, warps_k, helpers;    // warps side by side over row tiles, slices of K, warps that bring x
  int x_stages;                     // K-steps of x in shared memory, in the order of the offsets:
  int x_sums_offset, ring_offset;   // x, its sums over groups, rings of weights
  int stage_bytes;                  // of weights
  int received_offset;              // sums of the CTA beside
  int padded_row;                   // floats of a token's sums
  int groups_of_step, group_shift;  // K-step s begins with group s * groups_of_step >> group_shift
  int chunk_shift;                  // log2 of the 16-byte chunks of parameters of a K-step and row tile
  bool zeros;
};

constexpr int kBatchXStages = 32;
constexpr int kBatchX = 1024;  // where x begins, behind barriers

// `clusters` of `split` CTAs that share row tiles. False if a CTA has not enough warps or `shared_limit` bytes' room.
inline bool batch_params(const Problem& problem, const BatchConfig& config, int clusters, int split, int shared_limit,
                         BatchParams* to, int* shared_bytes) {
  BatchParams d{};
  const int row_tiles = static_cast<int>(tiles_n(problem.n)), k_tiles = static_cast<int>(tiles_k(problem.k));
  const int group_bytes = (problem.has_zeros ? 2 : 1) * kTileN * size_of(problem.scale_dtype);
  const bool one_group = problem.group_size >= problem.k;
  const int steps = (k_tiles + 1) / 2, max_m = static_cast<int>(config.max_m);
  d.row_tiles = row_tiles / clusters, d.more_row_tiles = row_tiles % clusters;
  d.steps = steps / split, d.more_steps = steps % split;
  d.tokens = static_cast<int>(problem.m);
  const int most_row_tiles = d.row_tiles + (d.more_row_tiles > 0), most_steps = d.steps + (d.more_steps > 0);

  d.warps_n = (most_row_tiles + 4 * config.tiles_n - 1) / (4 * config.tiles_n) * 4;  // warpgroups
  if (d.warps_n > config.warps || d.steps < 1) return false;
  d.warps_k = std::min(config.warps / d.warps_n, most_steps);
  const int warps = d.warps_n * d.warps_k;

  d.row_tile_bytes = static_cast<int64_t>(k_tiles) * kTileBytes;
  d.warp_tile_bytes = d.warps_n * d.row_tile_bytes;
  d.row_tile_scale_bytes = problem.groups() * group_bytes;
  d.groups_of_step = one_group ? 1 : std::max(kStepColumns / static_cast<int>(problem.group_size), 1);
  d.group_shift = one_group ? 30 : log2_of(problem.group_size / kStepColumns);
  d.chunk_shift = log2_of(d.groups_of_step * group_bytes / 16);
  const int whole_steps = static_cast<int>(problem.k / kStepColumns);
  d.plain_steps = config.tiles_n << d.chunk_shift <= 32 ? whole_steps : 0;
  d.plain_x_steps = problem.x_aligned ? whole_steps : 0;
  d.zeros = problem.has_zeros;

  d.padded_row = d.warps_n * config.tiles_n * kTileN + 4;
  // Copies that lie across lines of 128 bytes take longer.
  d.stage_bytes = round_up(config.tiles_n * (kStepBytes + d.groups_of_step * group_bytes), 128);
  const int received = split > 1 ? (d.tokens + 1) / 2 * d.padded_row * 4 : 0;
  const int ring = warps * config.stages * d.stage_bytes;
  const int x_bytes = max_m * kStepColumns * 2, x_sum_bytes = round_up(d.groups_of_step * max_m * 4, 128);
  const int room = std::min((shared_limit - kBatchX - ring - received) / (x_bytes + x_sum_bytes), kBatchXStages);
  // A place in the ring of x is filled by one warp and read by one slice only: the parity of a barrier cannot tell
  // more than two rounds apart.
  for (d.helpers = config.helpers; d.helpers > 0; --d.helpers) {
    const int together = std::lcm(d.warps_k, d.helpers);
    d.x_stages = room >= most_steps ? most_steps : room / together * together;
    if (d.x_stages == most_steps || d.x_stages >= 2 * d.helpers) break;
  }
  if (d.helpers == 0 || d.x_stages < 1) return false;
  d.x_sums_offset = kBatchX + d.x_stages * x_bytes;
  d.ring_offset = d.x_sums_offset + d.x_stages * x_sum_bytes;
  const int sums = kBatchX + d.warps_k * d.tokens * d.padded_row * 4;  // overlay x and the rings
  d.received_offset = std::max(d.ring_offset + ring, sums);
  *shared_bytes = d.received_offset + received;
  *to = d;
  return *shared_bytes <= shared_limit;
}

}  // namespace qao::int4_mm
