// Conversion of int4 weights with two-level scales: the group's factor is exact in the A operand.
//
// The float32 scale of the row is applied in the epilogue, so that accumulation over K needs no promotion for scaling.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "gemm/sm90_ws/dequant_int4.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

// Encodes a group's factor for 8-bit x. int8: an integer. `high`: for rows g + 8, in the upper nibbles.
template <typename T, bool high>
__device__ __forceinline__ uint32_t group_factor(float factor) {
  constexpr int kMagic = 0x4B400000;  // 1.5 * 2^23: the nearest integer ends up in the low bits
  return static_cast<uint32_t>(__float_as_int(factor + __int_as_float(kMagic)) - kMagic);
}
// e4m3 x: two float16, the power of two, and its product with -(nibble base + zero point) (Nibble).
template <>
__device__ __forceinline__ uint32_t group_factor<qao::wgmma::E5m2, false>(float factor) {
  return Half<__half>::pair(factor, factor * -(Nibble<__half, false>::kBase + 8));
}
template <>
__device__ __forceinline__ uint32_t group_factor<qao::wgmma::E5m2, true>(float factor) {
  return Half<__half>::pair(factor, factor * -(Nibble<__half, true>::kBase + 8));
}

template <typename T>
struct RowScaledOperand {
  uint4 words[2];
  uint2 factor[kAtomSteps];  // per 32 columns: rows g and g + 8

  // Loads a warp's row tile, and the output of make_group_factors() in `factors` unless there is one group per row.
  template <int rows>
  __device__ __forceinline__ void load(bool has_groups, uint32_t weight, uint32_t factors, int warp, int lane) {
    load_words(words, weight, warp, lane);
    const uint32_t pair = factors + (warp * 8 + lane / 4) * 8;
    constexpr float kOne = std::is_same_v<T, int8_t> ? kOneGroup : 1;
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
      factor[step] = has_groups ? ptx::load_shared_8(pair + step * rows * 4)
                                : make_uint2(group_factor<T, false>(kOne), group_factor<T, true>(kOne));
    }
  }

  // int8: q whole + (128 - 8 whole) is in 0..255, so one multiplication computes four of them without carries;
  // subtracting 128 gives the product. Factors outside -15 to 16 give wrong products and have no other effect.
  static __device__ __forceinline__ uint32_t multiplied(uint32_t nibbles, uint32_t whole) {
    return ((nibbles & 0x0F0F0F0F) * whole + (0x80808080 - whole * 0x08080808)) ^ 0x80808080;
  }
  // e5m2: the upper half of a float16, exact for -8 to 7 times a power of two. Others are truncated.
  template <bool high>
  static __device__ __forceinline__ uint32_t multiplied(uint32_t word, uint32_t upper, uint32_t factor) {
    using N = Nibble<__half, high>;
    const uint32_t times = pair_of_low(factor), less = pair_of_high(factor);
    const uint32_t even = Half<__half>::multiply_add(ptx::and_or(word, N::kMask, N::kMagic), times, less);
    const uint32_t odd = Half<__half>::multiply_add(ptx::and_or(upper, N::kMask, N::kMagic), times, less);
    return __byte_perm(even, odd, 0x7351);
  }
  __device__ __forceinline__ void convert(Operand<>& a) const {
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(words[step / 2], step % 2 * 2 + i);
        if constexpr (std::is_same_v<T, int8_t>) {
          a[step][2 * i] = multiplied(word, factor[step].x);
          a[step][2 * i + 1] = multiplied(word >> 4, factor[step].y);
        } else {
          a[step][2 * i] = multiplied<false>(word, word >> 8, factor[step].x);
          a[step][2 * i + 1] = multiplied<true>(word, word >> 8, factor[step].y);
        }
      }
    }
  }
};

}  // namespace qao::gemm::sm90_ws
