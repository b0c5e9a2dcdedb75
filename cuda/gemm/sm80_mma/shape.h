// Warp layout of a CTA tile, common to all mma.sync kernels.
#pragma once

#include "layout/int4.h"

namespace qao::gemm::sm80_mma {

using int4::kTileN;  // rows of the MMA's W operand

template <int warps_n, int warps_m, int warps_k, int tiles_n_, int tiles_m_, int stages, int ctas_per_sm>
struct Shape {
  static constexpr int kWarpsN = warps_n, kWarpsM = warps_m, kWarpsK = warps_k;
  static constexpr int kTilesN = tiles_n_, kTilesM = tiles_m_;  // per warp: 16 rows of W, 8 tokens
  static constexpr int kStages = stages;
  static constexpr int kCtasPerSm = ctas_per_sm;

  static constexpr int kRowTiles = warps_n * kTilesN;  // per CTA
  static constexpr int kN = kRowTiles * kTileN;        // rows of W per CTA
  static constexpr int kM = warps_m * kTilesM * 8;     // tokens per CTA
  static constexpr int kSliceThreads = 32 * warps_n * warps_m;
  static constexpr int kThreads = kSliceThreads * warps_k;
  static constexpr int kPaddedN = kN + 4;  // float32 partial sums of a token, padded against bank conflicts
};

}  // namespace qao::gemm::sm80_mma
