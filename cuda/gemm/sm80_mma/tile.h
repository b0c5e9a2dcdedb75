// Compile-time CTA shape and shared-memory layout of the portable kernels.
// The kernels and plan() share it.
#pragma once

#include <algorithm>
#include <cstdint>

#include "layout/int4.h"
#include "qao/types.h"

namespace qao::gemm::sm80_mma {

// Warp layout of a CTA tile, common to all mma.sync kernels.
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

// Split-K costs a second kernel and a round trip through memory. So it must fill otherwise idle slots among the `room`
// concurrent CTAs, and leave every split enough K-tiles for its pipeline of `pipeline` K-tiles.
inline int split_of(int64_t tiles, int64_t room, int64_t k_tiles, int64_t pipeline) {
  if (2 * tiles > room) return 1;
  return static_cast<int>(std::clamp<int64_t>(std::min(room / tiles, k_tiles / pipeline), 1, 32));
}

constexpr int kTileK = 128;    // columns of a K-tile (but see OperandBytes): 128 bytes of an 8-bit row, two int4 tiles
constexpr int kMaxGroups = 4;  // groups of 32 in a K-tile

// Shared-memory limit of a CTA on every GPU with fp8 mma.sync.
constexpr int kFp8SharedBytes = 99 * 1024;

// Bytes of the operands in a stage. `x_bytes` per element: 1 or 2; 0 if x is a ResidentX.
struct OperandBytes {
  int x_bytes;
  Format weight;

  // Float x with 4-bit W: a K-tile is one packed tile, 128 bytes of a row of x.
  constexpr bool weight_only() const { return is_packed(weight) && x_bytes == 2; }
  constexpr int columns() const { return weight_only() ? int4::kTileK : kTileK; }  // of a K-tile

  constexpr int weight_tile() const { return kTileN * columns() / (is_packed(weight) ? 2 : 1); }
  // Scales and zeros of 16 rows; for fp8 weights the scale of their block. Parameters of the tokens follow, which are
  // read in pairs.
  constexpr int weight_parameters(int row_tiles) const {
    if (is_packed(weight)) return row_tiles * (kMaxGroups * columns() / kTileK) * 2 * kTileN * 4;
    return may_have_blocks(weight) ? (row_tiles + 1) / 2 * 8 : 0;
  }
  // Per-token parameters: sums of x for the zero points; with fp8 weights, block scales of x.
  constexpr int token_parameters(int tokens) const {
    if (x_bytes == 0 || weight_only()) return 0;
    return is_packed(weight) ? kMaxGroups * tokens * 4 : may_have_blocks(weight) && x_bytes == 1 ? tokens * 4 : 0;
  }
};

// Formats of x that a row of tiles.inc supports: the tile that best fits shared memory depends on x. kQuantizes: the
// kernel quantizes a float x into a ResidentX.
enum class XKind { kAny, kEightBits, kSixteenBits, kQuantizes };
constexpr bool serves(XKind kind, bool sixteen_bits) {
  return kind == XKind::kAny || (kind == XKind::kSixteenBits) == sixteen_bits;
}
// Work of a CTA. Either a run of n-tiles: of any length (kRun); of one pass (kOnePass), also with small K
// (kOneShortPass) or very small K (kOneTinyPass); a long one (kLongRun). Or an output tile: of any GEMM (kTile), or of
// GEMMs that run in one wave (kOneWave).
enum class ShareKind { kRun, kOnePass, kOneShortPass, kOneTinyPass, kLongRun, kTile, kOneWave };
constexpr bool is_run(ShareKind kind) { return kind != ShareKind::kTile && kind != ShareKind::kOneWave; }
// Weight formats that a row supports. int8 costs few instructions; others are converted or scaled (kConverted). int4
// has half as many bytes.
enum class WeightKind { kAny, kInt8, kFp8, kInt4, kConverted, kEightBits };
constexpr bool serves(WeightKind kind, Format weight) {
  switch (kind) {
    case WeightKind::kInt8:
      return weight == Format::kInt8;
    case WeightKind::kFp8:
      return weight == Format::kFp8;
    case WeightKind::kInt4:
      return weight == Format::kInt4;
    case WeightKind::kConverted:
      return weight != Format::kInt8;
    case WeightKind::kEightBits:
      return weight != Format::kInt4;
    case WeightKind::kAny:
      return true;
  }
  return false;
}

// x of a few tokens, quantized by every CTA while its first K-tiles of W load. It stays in shared memory for all of K,
// and the ring holds W only.
//
//   offset 0     x, by K-tile and token: 128 bytes, swizzled as in the ring
//   parameters   float, by group or block and token: sums of x, or scales of its blocks
//   state        TokenState
struct ResidentX {
  static constexpr int kMaxTokens = 8, kMaxWarps = 16;
  struct TokenState {
    float scale[kMaxTokens], zero[kMaxTokens];
    uint32_t high[kMaxWarps], below[kMaxWarps];  // range of the values seen by a warp
    int64_t sum[kMaxWarps];
  };

  int tokens, k_tiles;
  int tile_parameters;  // per token and K-tile

  // Parameters are read for two tokens at once.
  QAO_HOST_DEVICE constexpr int token_stride() const { return (tokens + 1) / 2 * 2; }
  QAO_HOST_DEVICE constexpr int parameters_at() const { return k_tiles * tokens * kTileK; }
  QAO_HOST_DEVICE constexpr int state_at() const {
    return parameters_at() + k_tiles * tile_parameters * token_stride() * 4;
  }
  QAO_HOST_DEVICE constexpr int bytes() const { return state_at() + static_cast<int>(sizeof(TokenState)); }
};

// Offset of a ResidentX: after the ring and the partial sums, and after the unquantized x, which starts in the ring's
// last stage (the last to be filled).
constexpr int resident_at(int ring_bytes, int sum_bytes, int stages, int float_bytes) {
  const int behind_floats = ring_bytes / stages * (stages - 1) + float_bytes;
  return (std::max(ring_bytes + sum_bytes, behind_floats) + 127) / 128 * 128;
}

template <int warps_n, int warps_m, int warps_k, int tiles_n, int tiles_m, int stages, int ctas_per_sm>
struct Tile : Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm> {
  using Base = Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm>;

  // bfloat16 x and fp8 W: fp8 converts to float16 in one instruction and to bfloat16 in many. So x is converted to
  // float16 too, where that is less work than converting W.
  static constexpr bool kScalesX = 2 * tiles_m <= tiles_n;

  // A stage of a slice: W, x, parameters of the rows and of the tokens of one K-tile. The stages of all slices are
  // contiguous.
  static constexpr int weight_bytes(OperandBytes operands) { return Base::kRowTiles * operands.weight_tile(); }
  static constexpr int x_bytes(OperandBytes operands) { return Base::kM * operands.columns() * operands.x_bytes; }
  static constexpr int stage_bytes(OperandBytes operands) {
    const int bytes = weight_bytes(operands) + x_bytes(operands) + operands.weight_parameters(Base::kRowTiles) +
                      operands.token_parameters(Base::kM);
    return (bytes + 127) / 128 * 128;
  }

  // Partial sums of the epilogue in float32: kN rows per slice and token.
  static constexpr int kTokenSumBytes = warps_k * Base::kPaddedN * 4;
  static constexpr int ring_bytes(OperandBytes operands) { return warps_k * stages * stage_bytes(operands); }
};

}  // namespace qao::gemm::sm80_mma
