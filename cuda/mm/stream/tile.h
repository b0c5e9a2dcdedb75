// The compile-time shapes of the streaming bodies: one definition for the kernels and for plan().
#pragma once

#include "int4/layout.h"

namespace qao::mm::stream {

using int4::kSymmetricZero;
using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;
using int4::tiles_k;
using int4::tiles_n;

// A CTA's warps are slices of K; it computes tiles_n row tiles a pass.
constexpr int kStepColumns = 128, kStepBytes = kStepColumns / kTileK * kTileBytes;  // of a K-step

template <int tiles_m, int tiles_n, int warps, int ctas_per_sm>
struct RingTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesM = tiles_m, kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kCtasPerSm = ctas_per_sm;
  static constexpr int kTokens = 8 * tiles_m;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // sums of a token, against bank conflicts
};

// With all of x in shared memory.
constexpr int kTokenBytes = kStepColumns * 2 + 16;  // a token's columns of a K-step, padded against bank conflicts

template <int tiles_n, int warps, int stages, int ctas_per_sm>
struct ResidentTile {
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps;
  static constexpr int kStages = stages, kCtasPerSm = ctas_per_sm;
  static constexpr int kPaddedRow = tiles_n * kTileN + 4;  // sums of a token, against bank conflicts
};

// With x brought there by the copy engine: as it is, in boxes of 64 columns. The warps' sums of a pass fit into a
// stage.
constexpr int kTmaTokens = 16, kBoxColumns = 64, kBoxRowBytes = kBoxColumns * 2;
constexpr int kStepBoxes = kStepColumns / kBoxColumns;

// Of x there are `tokens`.
template <int tiles_n, int warps, int stages, int tokens = kTmaTokens>
struct TmaTile {
  static constexpr int kTokens = tokens;
  static_assert(warps % 2 == 0, "a warp's K-steps are whole groups of 256 apart");
  static constexpr int kTilesN = tiles_n, kWarps = warps, kThreads = 32 * warps, kStages = stages;
};

}  // namespace qao::mm::stream
