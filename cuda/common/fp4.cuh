// Codes as operands of 16 bits, whose format decides where a code's three lower bits lie: the highest of them are the
// lowest of an exponent, the last one is the first of a mantissa. So read, a code is its value times a power of two.
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
  static constexpr uint32_t kFactor = 0x7E807E80;  // a pair of 2^126, by which codes are too small
};
template <>
struct Place<__half> {
  static constexpr int kShift = 9;
  static constexpr uint32_t kFactor = 0x74007400;  // 2^14
};

// Of the four pairs of codes in a word, the i-th.
template <typename T>
__device__ __forceinline__ uint32_t small_pair(uint32_t word, int i) {
  constexpr uint32_t kMagnitude = 0x00070007u << Place<T>::kShift, kSign = 0x80008000u;
  const int left = Place<T>::kShift - 4 * i;
  const uint32_t magnitude = (left >= 0 ? word << (left & 31) : word >> (-left & 31)) & kMagnitude;
  return magnitude | (word << (12 - 4 * i) & kSign);
}

}  // namespace qao::fp4
