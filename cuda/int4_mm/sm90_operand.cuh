// The A operand of one K-tile: a warp's 16 rows of W as the tensor cores take them from registers.
#pragma once

#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "int4_mm/layout.h"
#include "int4_mm/sm90_tile.h"

namespace qao::int4_mm::sm90 {

constexpr int kSteps = kTileK / 16;  // products per K-tile
using Operand = uint32_t[kSteps][4];

// The nibbles as whole numbers of T: (magic + q) + offset is exact. Registers of a step are rows g, g + 8, g, g + 8.
template <typename T>
struct WholeNumbers {
  uint4 words;  // a thread's share: a k-step each

  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    words = ptx::load_shared_16(weight + warp * kTileBytes + lane * 16);
  }
  __device__ __forceinline__ uint32_t word(int i) const {
    return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], int step, const uint32_t (&offset)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Half<T>::add(ptx::and_or(word(step) >> (4 * i), 0x000F000F, Half<T>::kMagic), offset[i % 2]);
    }
  }
};

// q - 8, for a float32 x in bfloat16 parts: scales and zero points are applied to float32 sums.
struct ExactOperand : WholeNumbers<__nv_bfloat16> {
  __device__ __forceinline__ void load(uint32_t weight, uint32_t, int, int warp, int lane) {
    WholeNumbers::load(weight, warp, lane);
  }
  __device__ __forceinline__ void convert(Operand& a) const {
    constexpr uint32_t kOffset = 0xC308C308;  // -(128 + 8)
#pragma unroll
    for (int step = 0; step < kSteps; ++step) WholeNumbers::convert(a[step], step, {kOffset, kOffset});
  }
};

// (q - zero) scale, rounded once: with q' = q - the whole part of zero, exact, it is scale q' + (rest q' + shift),
// where `rest` is what T cuts off the scale and `shift` the fraction of zero, scaled. Mostly both are zero.
struct RowScale {  // of one row of W in one group, values of T: scale << 16 | offset, shift << 16 | rest
  uint32_t main, rest;
};
template <typename T>
__device__ __forceinline__ RowScale row_scale(float scale, float zero) {
  const uint32_t offset = Half<T>::pair(-Half<T>::kMagicValue - zero), rounded = Half<T>::pair(scale);
  const float fraction = -Half<T>::low(offset) - Half<T>::kMagicValue - zero;
  return {__byte_perm(offset, rounded, 0x5410),
          __byte_perm(Half<T>::pair(scale - Half<T>::low(rounded)), Half<T>::pair(scale * fraction), 0x5410)};
}
__device__ __forceinline__ uint32_t pair_of_low(uint32_t word) { return __byte_perm(word, 0, 0x1010); }
__device__ __forceinline__ uint32_t pair_of_high(uint32_t word) { return __byte_perm(word, 0, 0x3232); }

template <typename T>
struct ScaledOperand : WholeNumbers<T> {
  RowScale scales[2][2];  // of the halves of the K-tile, rows g and g + 8
  bool plain;             // the parts called `rest` are zero, for all of the warp

  static __device__ __forceinline__ RowScale load_scale(uint32_t from) {
    const uint2 words = ptx::load_shared_8(from);
    return {words.x, words.y};
  }
  // `from`: what make_scales() left, [group of the K-tile][row].
  __device__ __forceinline__ void load(uint32_t weight, uint32_t from, int groups, int warp, int lane) {
    WholeNumbers<T>::load(weight, warp, lane);
    const uint32_t at = from + (warp * kTileN + lane / 4) * kRowScaleBytes;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      scales[0][high] = scales[1][high] = load_scale(at + high * 8 * kRowScaleBytes);
      if (groups > 1) scales[1][high] = load_scale(at + (kRows + high * 8) * kRowScaleBytes);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= scales[i / 2][i % 2].rest;
    plain = !__any_sync(0xFFFFFFFFu, (bits & 0x7FFF7FFF) != 0);
  }
  __device__ __forceinline__ void convert(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const RowScale(&rows)[2] = scales[step / 2];
      WholeNumbers<T>::convert(a[step], step, {pair_of_low(rows[0].main), pair_of_low(rows[1].main)});
    }
    if (plain) {
      scale<false>(a);
    } else {
      scale<true>(a);
    }
  }
  template <bool with_rest>
  __device__ __forceinline__ void scale(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t less = 0x80008000;  // minus zero
        const RowScale& row = scales[step / 2][i % 2];
        if (with_rest) less = Half<T>::multiply_add(a[step][i], pair_of_low(row.rest), pair_of_high(row.rest));
        a[step][i] = Half<T>::multiply_add(a[step][i], pair_of_high(row.main), less);
      }
    }
  }
};

}  // namespace qao::int4_mm::sm90
