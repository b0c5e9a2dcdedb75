// The compile-time shape of the sm80 kernel and its shared-memory layout: one definition for the kernel and for plan().
#pragma once

#include <algorithm>

#include "int4/layout.h"

namespace qao::int4_mm {

using int4::kSymmetricZero;
using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;
using int4::tiles_k;
using int4::tiles_n;

template <int warps_n, int warps_m, int warps_k, int tiles_n_, int tiles_m_, int stages, int ctas_per_sm>
struct Tile {
  static constexpr int kWarpsN = warps_n, kWarpsM = warps_m, kWarpsK = warps_k;
  static constexpr int kTilesN = tiles_n_, kTilesM = tiles_m_;  // per warp: 16 rows of W, 8 tokens
  static constexpr int kStages = stages;
  static constexpr int kCtasPerSm = ctas_per_sm;

  static constexpr int kRowTiles = warps_n * kTilesN;  // per CTA
  static constexpr int kN = kRowTiles * kTileN;        // rows of W per CTA
  static constexpr int kM = warps_m * kTilesM * 8;     // tokens per CTA
  static constexpr int kSliceThreads = 32 * warps_n * warps_m;
  static constexpr int kThreads = kSliceThreads * warps_k;

  // A stage of a slice: packed weights, x, scales of one K-tile.
  static constexpr int kWeightBytes = kRowTiles * kTileBytes;
  static constexpr int kRowBytes = kTileK * 2;  // a token's 64 16-bit values
  static constexpr int kXBytes = kM * kRowBytes;
  static constexpr int kScaleTileBytes = 2 * 2 * kTileN * 4;  // at most two groups, scale and zero, float32
  static constexpr int kScaleBytes = kRowTiles * kScaleTileBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes + kScaleBytes;

  // The epilogue reuses the ring: a float32 tile per slice, rows padded against bank conflicts.
  static constexpr int kPaddedN = kN + 4;
  static constexpr int kEpilogueBytes = warps_k * kM * kPaddedN * 4;
  static constexpr int kSharedBytes = std::max(warps_k * stages * kStageBytes, kEpilogueBytes);
};

// The shape of the body for few tokens. A CTA's warps are slices of K; it computes tiles_n row tiles a pass.
constexpr int kStepColumns = 128, kStepBytes = kStepColumns / kTileK * kTileBytes;  // of a K-step

template <int tiles_m, int tiles_n, int warps, int ctas_per_sm>
struct DecodeTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesM = tiles_m, kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kCtasPerSm = ctas_per_sm;
  static constexpr int kTokens = 8 * tiles_m;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // sums of a token, against bank conflicts
};

// The same for at most eight tokens, with x in shared memory.
constexpr int kTokenBytes = kStepColumns * 2 + 16;  // a token's columns of a K-step, padded against bank conflicts

template <int tiles_n, int warps, int stages, int ctas_per_sm>
struct FewTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kStages = stages, kCtasPerSm = ctas_per_sm;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // sums of a token, against bank conflicts
};

// The same for 9 to 16 tokens: x is copied as it is, in boxes of 64 columns. The warps' sums of a pass fit into a
// stage.
constexpr int kSharedTokens = 16, kBoxColumns = 64, kBoxRowBytes = kBoxColumns * 2;
constexpr int kBoxBytes = kSharedTokens * kBoxRowBytes, kStepBoxes = kStepColumns / kBoxColumns;

template <int tiles_n, int warps, int stages>
struct SharedTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps, kStages = stages;
};

}  // namespace qao::int4_mm
