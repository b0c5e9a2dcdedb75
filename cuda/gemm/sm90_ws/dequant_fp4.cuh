// Conversion of fp4 weights (layout/fp4.h) with bfloat16 x: code * scale, exact in bfloat16.
//
// The divisor of a row's scales is applied in the epilogue.
#pragma once

#include "common/fp4.cuh"
#include "gemm/sm90_ws/dequant_int4.cuh"
#include "layout/fp4.h"

namespace qao::gemm::sm90_ws {

// Operands are 2^-33 W: scales are multiplied by 2^93, and fp4::small_pair() adds 2^-126 (common/fp4.cuh).
constexpr uint32_t kFp4ScaleUp = 0x6E006E00;  // 2^93 twice
constexpr float kFp4Factor = 0x1p33f;

template <int rows, int steps>
struct RawOperand<__nv_bfloat16, Format::kFp4, true, rows, steps> {
  static constexpr int kTiles = steps / kAtomSteps;  // tiles of 64 k

  uint4 words[kTiles];
  uint32_t scales[steps];  // rows g and g + 8, per 16 columns

  // Offset of a lane's scales in the output of make_fp4_scales().
  static __device__ __forceinline__ uint32_t scale_offset(int warp, int lane) { return (warp * 8 + lane / 4) * 4; }

  template <int groups>
  __device__ __forceinline__ void load(uint32_t of_words, uint32_t of_scales, uint32_t) {
    constexpr int kSpan = steps / groups;
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      scales[i] = i % kSpan == 0 ? ptx::load_shared_word(of_scales + i / kSpan * (rows * 2)) : scales[i - 1];
    }
    load_words(words, of_words);
  }
  __device__ __forceinline__ void convert(Operand<steps>& a) const {
    using T = __nv_bfloat16;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint32_t word = word_of(words[step / kAtomSteps], step % kAtomSteps);
      const uint32_t of[2] = {pair_of_low(scales[step]), pair_of_high(scales[step])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[step][i] = Half<T>::multiply_add(fp4::small_pair<T>(word, i), of[i % 2], 0x80008000u);
      }
    }
  }
};

// Reorders the scales of a k-tile's groups from [row tile][group][16 rows] to [group][row tile][g][rows g and g + 8].
// Executed by a warp; each lane handles two pairs of rows at a time.
template <int rows>
__device__ __forceinline__ void make_fp4_scales(const Params& p, int lane, uint32_t from, uint32_t to) {
  constexpr int kLanes = 4;  // lanes per row tile
#pragma unroll 1
  for (int group = 0; group < p.groups_per_tile; ++group) {
    for (int i = lane; i < p.tile_rows / 4; i += 32) {
      const uint32_t tile = from + (i / kLanes * p.groups_per_tile + group) * p.group_bytes + i % kLanes * 4;
      const auto up = [](uint32_t pair) { return Half<__nv_bfloat16>::multiply_add(pair, kFp4ScaleUp, 0x80008000u); };
      const uint32_t low = up(ptx::load_shared_word(tile)), high = up(ptx::load_shared_word(tile + 16));
      const uint32_t at = to + group * (rows * 2) + i * 8;
      ptx::store_shared_4(at, __byte_perm(low, high, 0x5410));
      ptx::store_shared_4(at + 4, __byte_perm(low, high, 0x7632));
    }
  }
}

// Scale of a row of an NVFP4 weight: 1 / divisor.
__device__ __forceinline__ float fp4_row_scale(const Params& p, int row) {
  const int64_t at = int4::scale_offset(row, p.scale_rows - fp4::kRowParts, p.scale_rows, 1, 0);
  float divisor = 0;
#pragma unroll
  for (int part = 0; part < fp4::kRowParts; ++part) {
    divisor += load_float(p.row_scales, at + part * int4::kTileN, DType::kBFloat16);
  }
  return 1 / divisor;
}

}  // namespace qao::gemm::sm90_ws
