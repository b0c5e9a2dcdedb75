// Compile-time tile shapes of the skinny-GEMM (decode) kernels, shared by the kernels and plan().
#pragma once

#include "layout/int4.h"
#include "qao/types.h"

namespace qao::gemm::sm90_skinny {

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

}  // namespace qao::gemm::sm90_skinny
