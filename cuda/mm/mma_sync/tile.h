// The compile-time shape of a CTA and its shared-memory layout: one definition for the kernels and for plan().
#pragma once

#include <algorithm>

#include "mm/mma_sync/shape.h"
#include "qao/types.h"

namespace qao::mm::mma_sync {

constexpr int kTileK = 128;    // columns of a K-tile: 128 bytes of a row of eight bits, two packed int4 tiles
constexpr int kMaxGroups = 4;  // groups of 32 in a K-tile

// Of a CTA, on every GPU whose mma.sync multiplies e4m3.
constexpr int kFp8SharedBytes = 99 * 1024;

// What the operands of a product take in a stage. `x_bytes`: of one element, 1 or 2; 0: x is a ResidentX.
struct OperandBytes {
  int x_bytes;
  Format weight;

  constexpr int weight_tile() const { return kTileN * kTileK / (is_packed(weight) ? 2 : 1); }
  // Scales and zero points of 16 rows; of an fp8 weight the scale of their block. Behind them are the tokens', which
  // are read two at once.
  constexpr int weight_parameters(int row_tiles) const {
    if (is_packed(weight)) return row_tiles * kMaxGroups * 2 * kTileN * 4;
    return may_have_blocks(weight) ? (row_tiles + 1) / 2 * 8 : 0;
  }
  // Of tokens: sums of x for the zero points; with an fp8 weight, scales of blocks of x.
  constexpr int token_parameters(int tokens) const {
    if (x_bytes == 0) return 0;
    return is_packed(weight) ? kMaxGroups * tokens * 4 : may_have_blocks(weight) && x_bytes == 1 ? tokens * 4 : 0;
  }
};

// Which x a row of tiles.inc is for: the tile that fits shared memory best depends on it. kQuantizes: floats that the
// kernel quantises itself, into a ResidentX.
enum class XKind { kAny, kEightBits, kSixteenBits, kQuantizes };
constexpr bool serves(XKind kind, bool sixteen_bits) {
  return kind == XKind::kAny || (kind == XKind::kSixteenBits) == sixteen_bits;
}
// What a CTA of a row computes. A run of row tiles: of any length (kRun); that is one pass (kOnePass), also with few
// columns (kOneShortPass) or very few (kOneTinyPass); that is long (kLongRun). Or a tile of y: in any product (kTile);
// in products whose tiles all run at once (kOneWave).
enum class ShareKind { kRun, kOnePass, kOneShortPass, kOneTinyPass, kLongRun, kTile, kOneWave };
constexpr bool is_run(ShareKind kind) { return kind != ShareKind::kTile && kind != ShareKind::kOneWave; }
// Which weights a row is for: int8 costs few instructions, others are converted or scaled (kConverted); int4 has half
// as many bytes.
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

// x of a few tokens that arrives as floats. Every CTA quantises it while its first K-tiles of W arrive and keeps it in
// shared memory for all of K; the ring holds W alone.
//
//   offset 0     x, by K-tile and token: 128 bytes, swizzled as in the ring
//   parameters   float, by group or block and token: sums of x, or scales of its blocks
//   state        TokenState
struct ResidentX {
  static constexpr int kMaxTokens = 8, kMaxWarps = 16;
  struct TokenState {
    float scale[kMaxTokens], zero[kMaxTokens];
    uint32_t high[kMaxWarps], below[kMaxWarps];  // range of the values that a warp has seen
    int64_t sum[kMaxWarps];
  };

  int tokens, k_tiles;
  int tile_parameters;  // a token and K-tile

  // Parameters are read for two tokens at once.
  QAO_HOST_DEVICE constexpr int token_stride() const { return (tokens + 1) / 2 * 2; }
  QAO_HOST_DEVICE constexpr int parameters_at() const { return k_tiles * tokens * kTileK; }
  QAO_HOST_DEVICE constexpr int state_at() const {
    return parameters_at() + k_tiles * tile_parameters * token_stride() * 4;
  }
  QAO_HOST_DEVICE constexpr int bytes() const { return state_at() + static_cast<int>(sizeof(TokenState)); }
};

// Where a ResidentX begins: behind the ring and the sums, and behind the floats of x, which lie in the ring's last
// stage (the last to be filled) and beyond.
constexpr int resident_at(int ring_bytes, int sum_bytes, int stages, int float_bytes) {
  const int behind_floats = ring_bytes / stages * (stages - 1) + float_bytes;
  return (std::max(ring_bytes + sum_bytes, behind_floats) + 127) / 128 * 128;
}

template <int warps_n, int warps_m, int warps_k, int tiles_n, int tiles_m, int stages, int ctas_per_sm>
struct Tile : Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm> {
  using Base = Shape<warps_n, warps_m, warps_k, tiles_n, tiles_m, stages, ctas_per_sm>;

  // bfloat16 x fp8: fp8 becomes float16 in one instruction and bfloat16 in many. So where converting x is less work
  // than converting W, x becomes float16 too.
  static constexpr bool kScalesX = 2 * tiles_m <= tiles_n;

  // A stage of a slice: W, x, parameters of the rows and of the tokens, of one K-tile. The stages of all slices lie
  // together.
  static constexpr int weight_bytes(OperandBytes operands) { return Base::kRowTiles * operands.weight_tile(); }
  static constexpr int x_bytes(OperandBytes operands) { return Base::kM * kTileK * operands.x_bytes; }
  static constexpr int stage_bytes(OperandBytes operands) {
    const int bytes = weight_bytes(operands) + x_bytes(operands) + operands.weight_parameters(Base::kRowTiles) +
                      operands.token_parameters(Base::kM);
    return (bytes + 127) / 128 * 128;
  }

  // The epilogue's float32 sums: for each slice and token, those of kN rows.
  static constexpr int kTokenSumBytes = warps_k * Base::kPaddedN * 4;
  static constexpr int ring_bytes(OperandBytes operands) { return warps_k * stages * stage_bytes(operands); }
};

}  // namespace qao::mm::mma_sync
