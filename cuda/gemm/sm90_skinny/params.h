// Tiles and kernel parameters of the skinny-GEMM kernels. One function computes the parameters for plan() and launch().
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/problem.h"
#include "layout/int4.h"
#include "qao/gemm.h"
#include "qao/types.h"

namespace qao::gemm::sm90_skinny {

// ---- Tiles ----

using int4::kSymmetricZero;
using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;
using int4::tiles_k;
using int4::tiles_n;

// The warps of a CTA split K. A CTA computes kTilesN n-tiles of 16 rows of W per pass.
constexpr int kStepColumns = 128, kStepBytes = kStepColumns / kTileK * kTileBytes;  // per K-step and n-tile

// Bytes of scales and zeros per K-step and n-tile, and the 16-byte chunks of those of `tiles_n` n-tiles. A lane copies
// one chunk in mainloop_smem_x.cuh, and at most two in plain K-steps of mainloop_ring_x.cuh. Kernels for more chunks
// are not compiled.
constexpr int step_scale_bytes(int groups, bool zeros, DType dtype) {
  return groups * (zeros ? 2 : 1) * kTileN * size_of(dtype);
}
constexpr int scale_chunks(int tiles_n, int scale_bytes) { return tiles_n * scale_bytes / 16; }
constexpr int kSmemXChunks = 32, kPlainChunks = 64;

template <int tiles_m, int tiles_n, int warps, int ctas_per_sm>
struct RingXTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesM = tiles_m, kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kCtasPerSm = ctas_per_sm;
  static constexpr int kTokens = 8 * tiles_m;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // partial sums of a token, padded against bank conflicts
};

// Tile with all of x in shared memory.
constexpr int kTokenBytes = kStepColumns * 2 + 16;  // a token's columns of one K-step, padded against bank conflicts

template <int tiles_n, int warps, int stages, int ctas_per_sm>
struct SmemXTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kStages = stages, kCtasPerSm = ctas_per_sm;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // partial sums of a token, padded against bank conflicts
};

// Tile with x loaded by TMA, unscaled, in boxes of 64 columns. The warps' partial sums of a pass fit into one stage.
constexpr int kTmaXTokens = 16, kBoxColumns = 64, kBoxRowBytes = kBoxColumns * 2;
constexpr int kStepBoxes = kStepColumns / kBoxColumns;

// `tokens` is the number of token slots of x.
template <int tiles_n, int warps, int stages, int tokens = kTmaXTokens>
struct TmaXTile {
  static constexpr int kTokens = tokens;
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps, kStages = stages;
};

// ---- Partition of a problem: CTAs own runs of n-tiles, warps take K-steps ----

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

// ---- sm90_skinny_smem_x ----

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

// ---- sm90_skinny_tma_x ----

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

// ---- sm90_skinny_ring_x ----

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
