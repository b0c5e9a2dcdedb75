// Compile-time CTA shape and shared-memory layout of the portable W4A16 kernels.
// The kernels and plan() share it.
#pragma once

#include <algorithm>

#include "gemm/sm80_mma/tile.h"
#include "layout/int4.h"

namespace qao::gemm::sm80_mma::weight_only {

using int4::kSymmetricZero;
using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

template <int warps_n, int warps_m, int warps_k, int tiles_n, int tiles_m, int stages, int ctas_per_sm>
struct Tile : Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm> {
  using Base = Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm>;

  // A stage of a slice: packed weights, x, and scales of one K-tile.
  static constexpr int kWeightBytes = Base::kRowTiles * kTileBytes;
  static constexpr int kRowBytes = kTileK * 2;  // 64 16-bit values of a token
  static constexpr int kXBytes = Base::kM * kRowBytes;
  static constexpr int kScaleTileBytes = 2 * 2 * kTileN * 4;  // at most two groups, scale and zero, float32
  static constexpr int kScaleBytes = Base::kRowTiles * kScaleTileBytes;
  static constexpr int kStageBytes = kWeightBytes + kXBytes + kScaleBytes;

  // The epilogue reuses the ring for one float32 tile per slice.
  static constexpr int kEpilogueBytes = warps_k * Base::kM * Base::kPaddedN * 4;
  static constexpr int kSharedBytes = std::max(warps_k * stages * kStageBytes, kEpilogueBytes);
};

}  // namespace qao::gemm::sm80_mma::weight_only
