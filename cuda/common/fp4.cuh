// fp4 codes as 16-bit operands.
//
// The low three bits of a code (two of exponent, one of mantissa) are shifted across the boundary between exponent and
// mantissa of the 16-bit format. The result is the code's value times a power of two.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qao::fp4 {

template <typename T>
struct Place;
template <>
struct Place<__nv_bfloat16> {
  static constexpr int kShift = 6;
  static constexpr uint32_t kFactor = 0x7E807E80;  // 2^126 twice: the factor that restores the value
};
template <>
struct Place<__half> {
  static constexpr int kShift = 9;
  static constexpr uint32_t kFactor = 0x74007400;  // 2^14
};

// Pair `i` of the four pairs of codes in a word.
template <typename T>
__device__ __forceinline__ uint32_t small_pair(uint32_t word, int i) {
  constexpr uint32_t kMagnitude = 0x00070007u << Place<T>::kShift, kSign = 0x80008000u;
  const int left = Place<T>::kShift - 4 * i;
  const uint32_t magnitude = (left >= 0 ? word << (left & 31) : word >> (-left & 31)) & kMagnitude;
  return magnitude | (word << (12 - 4 * i) & kSign);
}

}  // namespace qao::fp4
