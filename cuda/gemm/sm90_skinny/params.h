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
// one chunk in smem_x.cuh, and at most two in plain K-steps of ring_x.cuh. Kernels for more chunks
// are not compiled.
constexpr int step_scale_bytes(int groups, bool zeros, DType dtype) {
  return groups * (zeros ? 2 : 1) * kTileN * size_of(dtype);
}
constexpr int scale_chunks(int tiles_n, int scale_bytes) { return tiles_n * scale_bytes / 16; }
constexpr int kSmemXChunks = 32, kPlainChunks = 64;

// Tile of a CTA, a row of a tiles_*.inc. `tokens` and `stages` of a warp's ring are maxima.
template <int tokens, int tiles_n, int warps, int stages, int ctas_per_sm = 1>
struct Tile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTokens = tokens, kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kStages = stages, kCtasPerSm = ctas_per_sm;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // partial sums of a token, padded against bank conflicts
};

// The same for host code.
struct Config {
  int tokens, tiles_n, warps, stages, ctas_per_sm, padded_row;
};
template <typename Tile>
constexpr Config config_of() {
  return {Tile::kTokens, Tile::kTilesN, Tile::kWarps, Tile::kStages, Tile::kCtasPerSm, Tile::kPaddedRow};
}

constexpr Config kSmemX[] = {
#define QAO_SMEM_X(...) config_of<Tile<__VA_ARGS__>>(),
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};
constexpr Config kTmaX[] = {
#define QAO_TMA_X(...) config_of<Tile<__VA_ARGS__>>(),
#include "gemm/sm90_skinny/tiles_tma_x.inc"
#undef QAO_TMA_X
};
constexpr Config kRingX[] = {
#define QAO_RING_X(...) config_of<Tile<__VA_ARGS__>>(),
#include "gemm/sm90_skinny/tiles_ring_x.inc"
#undef QAO_RING_X
};

// ---- Partition of a problem: CTAs own runs of n-tiles, warps take K-steps ----

// Kernel parameters of the weight loader and the mainloop, which fill_walk() fills in. An n-tile ("row tile") has 16
// rows of W, a K-step kStepColumns columns.
struct Partition {
  static constexpr int kChunksOfLane = 1;  // 16-byte chunks of scales that a lane copies in a plain K-step, at most
  int row_tiles, more_row_tiles;  // per CTA, counted in pairs if gated; the first `more_row_tiles` CTAs have one more
  int passes;                     // over the n-tiles
  int steps, plain_steps;         // K-steps of a CTA; the first `plain_steps` of W are whole, and few copies per lane
  int tokens;
  int64_t row_tile_bytes, row_tile_scale_bytes;
  int64_t next_tile_bytes, next_tile_scale_bytes;  // between the n-tiles of a pass
  int64_t next_pass_bytes, next_pass_scale_bytes;  // between passes
  int groups_of_step, group_shift;                 // the first group of K-step s is s * groups_of_step >> group_shift
  int chunk_shift;    // log2 of the 16-byte chunks of scales and zeros per K-step and n-tile
  int scale_advance;  // bytes of scales and zeros between two K-steps of a warp
  bool zeros;
  int scale_bytes() const { return 16 << chunk_shift; }  // per K-step and n-tile
};

// Number of passes of `tiles_n` n-tiles.
inline int passes_over(int row_tiles, int tiles_n) { return (row_tiles + tiles_n - 1) / tiles_n; }

// Divides `row_tiles` n-tiles (pairs if gated) among `ctas` CTAs, and K-steps among the warps of a CTA. Returns the
// n-tiles of the CTA with the most.
inline int fill_walk(const Problem& problem, const Config& config, int row_tiles, int ctas, Partition* to,
                     bool gated = false) {
  Partition& d = *to;
  d.row_tiles = row_tiles / ctas, d.more_row_tiles = row_tiles % ctas;
  const int most = d.row_tiles + (d.more_row_tiles > 0);
  d.passes = passes_over(most << gated, config.tiles_n);
  d.steps = static_cast<int>((tiles_k(problem.k) + 1) / 2), d.plain_steps = static_cast<int>(problem.k / kStepColumns);
  d.tokens = static_cast<int>(problem.m);
  d.row_tile_bytes = tiles_k(problem.k) * kTileBytes;
  d.row_tile_scale_bytes = scale_rows(problem) * group_bytes(problem);
  const int distance = gated ? row_tiles : 1, of_pass = config.tiles_n >> gated;
  d.next_tile_bytes = distance * d.row_tile_bytes, d.next_tile_scale_bytes = distance * d.row_tile_scale_bytes;
  d.next_pass_bytes = of_pass * d.row_tile_bytes, d.next_pass_scale_bytes = of_pass * d.row_tile_scale_bytes;
  d.zeros = problem.has_zeros;
  d.groups_of_step = 1, d.group_shift = 30, d.scale_advance = 0;  // one group for all steps
  if (problem.group_size < problem.k) {
    d.groups_of_step = std::max(kStepColumns / static_cast<int>(problem.group_size), 1);
    d.group_shift = log2_of(problem.group_size / kStepColumns);
    d.scale_advance = (config.warps * d.groups_of_step >> d.group_shift) * group_bytes(problem);
  }
  d.chunk_shift = log2_of(d.groups_of_step * group_bytes(problem) / 16);
  return most;
}

// ---- sm90_skinny_smem_x ----

constexpr int kSmemXTokens = 8;
constexpr int kTokenBytes = kStepColumns * 2 + 16;  // a token's columns of one K-step, padded against bank conflicts
constexpr int kZeroBytes = 16;                      // a block of zeros after x in shared memory

struct SmemXParams : Partition {
  int normed, gated;  // 0 or 1. gated: a pass computes one n-tile of gate and one of up
  int slots;          // how many passes' partial sums fit in shared memory at once
  int zeros_offset, ring_offset, factors_offset, partials_offset, stage_bytes;  // offsets in shared memory, after x
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
inline bool smem_x_params(const Problem& problem, const Config& config, int ctas, int shared_limit, SmemXParams* to,
                          int* shared_bytes, int passes = 0) {
  SmemXParams d{};
  d.normed = problem.normed, d.gated = problem.gated;
  const int row_tiles = passes > 0 ? passes : static_cast<int>(tiles_n(problem.n)) >> d.gated;
  const int most = fill_walk(problem, config, row_tiles, ctas, &d, problem.gated);
  if (passes > 0) d.passes = most;
  if (d.tokens * d.groups_of_step > kSmemXTokens || scale_chunks(config.tiles_n, d.scale_bytes()) > kSmemXChunks)
    return false;

  const int64_t x_bytes = static_cast<int64_t>(d.steps) * d.tokens * kTokenBytes;
  if (x_bytes > shared_limit) return false;
  d.zeros_offset = static_cast<int>(x_bytes);
  const int slot_bytes = config.warps * d.tokens * config.padded_row * 4;
  // Copies that straddle 128-byte lines are slower.
  d.stage_bytes = round_up(config.tiles_n * (kStepBytes + d.scale_bytes()), 128);
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

// TMA loads x, unscaled, in boxes of 64 columns. The warps' partial sums of a pass fit into one stage.
constexpr int kTmaXTokens = 16, kBoxColumns = 64, kBoxRowBytes = kBoxColumns * 2;
constexpr int kStepBoxes = kStepColumns / kBoxColumns;

// Bytes of 16-bit scales and zeros per group and n-tile.
constexpr int tma_x_group_bytes(bool zeros) { return (zeros ? 2 : 1) * kTileN * 2; }
// Copies that straddle 128-byte lines are slower.
constexpr int tma_x_stage_bytes(int tiles_n, bool zeros) {
  return round_up(tiles_n * (kStepBytes + tma_x_group_bytes(zeros)), 128);
}

struct TmaXParams : Partition {
  int ring_offset, barriers_offset, places_offset;  // in shared memory, after x
};

// Returns false if K is not a multiple of a K-step, if a group is smaller than a K-step, if scales are wider than 16
// bits, if TMA cannot read x, or if a CTA needs more than `shared_limit` bytes.
inline bool tma_x_params(const Problem& problem, const Config& config, int ctas, int shared_limit, TmaXParams* to,
                         int* shared_bytes) {
  if (size_of(problem.scale_dtype) != 2 || !problem.x_aligned) return false;
  if (tiles_k(problem.k) % 2 != 0) return false;
  TmaXParams d{};
  fill_walk(problem, config, static_cast<int>(tiles_n(problem.n)), ctas, &d);
  if (d.groups_of_step > 1) return false;
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

struct RingXParams : Partition {
  static constexpr int kChunksOfLane = 2;
  int more_steps;  // the first `more_steps` CTAs of a cluster that splits K have one more
  int slots;       // how many passes' partial sums fit in shared memory at once
  int stages, stage_bytes, scale_offset, x_offset;  // of the ring; offsets of scales/zeros and of x in a stage
  int columns_of_token, token_shift;                // groups per K-step, or 1; log2 of the tokens in eight MMA columns
  bool clustered;
};

// Fills in the parameters for `clusters` clusters of `split` CTAs. Returns false if a CTA needs more than
// `shared_limit` bytes.
inline bool ring_x_params(const Problem& problem, const Config& config, int split, int clusters, int shared_limit,
                          RingXParams* to, int* shared_bytes) {
  RingXParams d{};
  const int most = fill_walk(problem, config, static_cast<int>(tiles_n(problem.n)), clusters, &d);
  d.more_steps = d.steps % split, d.steps /= split;
  const int groups_shift = log2_of(d.groups_of_step);
  const bool pairs = !is_float_fp4(problem) && config.tokens == 8 && problem.m << groups_shift <= 8;
  d.columns_of_token = pairs ? d.groups_of_step : 1;
  d.token_shift = pairs ? 3 - groups_shift : 3;
  if (!problem.x_aligned || scale_chunks(config.tiles_n, d.scale_bytes()) > kPlainChunks) d.plain_steps = 0;
  d.clustered = split > 1;

  // The kernel reads n-tiles past the end as well. The stage reserves room for them with an fp4 weight, so that no
  // other data is written there.
  const int held = is_float_fp4(problem) ? config.tiles_n : std::min(most, config.tiles_n);
  d.scale_offset = held * kStepBytes;
  d.x_offset = round_up(d.scale_offset + held * d.scale_bytes(), 128);
  d.stage_bytes = d.x_offset + d.tokens * kStepColumns * 2;
  const int slot_bytes = config.warps * d.tokens * d.columns_of_token * config.padded_row * 4;
  for (d.stages = config.stages; d.stages >= 2; --d.stages) {
    const int ring = d.stages * config.warps * d.stage_bytes;
    d.slots = std::min(d.passes, (shared_limit - ring) / slot_bytes);
    // The kernel reads the last stage as if all its n-tiles existed, so shared memory must cover them.
    const int read =
        ring - d.stage_bytes + std::max(config.tiles_n * kStepBytes, d.scale_offset + config.tiles_n * d.scale_bytes());
    *shared_bytes = std::max(ring + d.slots * slot_bytes, read);
    if (d.slots >= 1 && *shared_bytes <= shared_limit) {
      *to = d;
      return true;
    }
  }
  return false;
}

// Shared memory per CTA that lets config.ctas_per_sm CTAs share an SM. Each CTA uses 1 KB more than it requests.
inline int ring_x_shared_limit(const Config& config, int shared_bytes_per_cta) {
  return (shared_bytes_per_cta + 1024) / config.ctas_per_sm - 1024;
}

}  // namespace qao::gemm::sm90_skinny
