// The A operand of an int4 W whose scales have two levels: a factor for each group, and one scale a row, which waits
// for the epilogue. The factor is in the operand, exactly, so that sums along all of K need no other.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "int4/layout.h"
#include "mm/wgmma/operand.cuh"

namespace qao::mm::wgmma {

// What stands for a group's factor beside an x of T's kind, `high`: of rows g + 8, whose nibbles lie higher. Beside
// int8 a whole number.
template <typename T, bool high>
__device__ __forceinline__ uint32_t group_factor(float factor) {
  constexpr int kMagic = 0x4B400000;  // 1.5 * 2^23: the nearest whole number of a small one lies in the last bits
  return static_cast<uint32_t>(__float_as_int(factor + __int_as_float(kMagic)) - kMagic);
}
// Beside e4m3 two float16: a power of two, and with it what takes a nibble's base and the zero point off (Nibble).
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
  uint2 factor[kAtomSteps];  // of each 32 columns: rows g and g + 8

  // From a warp's row tile, and what make_group_factors() left in `factors`; or without: one group a row.
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

  // int8: q whole + (128 - 8 whole) is from 0 to 255, so that four of them are one multiplication without carries; less
  // 128 it is the product. Others than the whole numbers from -15 to 16 give wrong products and do no harm.
  static __device__ __forceinline__ uint32_t multiplied(uint32_t nibbles, uint32_t whole) {
    return ((nibbles & 0x0F0F0F0F) * whole + (0x80808080 - whole * 0x08080808)) ^ 0x80808080;
  }
  // e5m2: the upper half of a float16, which holds all of -8 to 7 times a power of two. Others are cut off.
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

}  // namespace qao::mm::wgmma
