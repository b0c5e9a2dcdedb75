// Conversion of fp4 codes to bfloat16 operands of the skinny-GEMM kernels.
#pragma once

#include "common/fp4.cuh"

namespace qao::gemm::sm90_skinny {

// Converts a word to four pairs, as fp4::small_pair(). One integer multiplication moves the magnitude and the sign of a
// code at once, since they do not overlap. That takes fewer instructions, and fewer of them on the logic pipe.
__device__ __forceinline__ void small_pairs(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr int kShift = fp4::Place<__nv_bfloat16>::kShift;
  constexpr uint32_t kBits = 0x80008000u | 0x00070007u << kShift;
  constexpr uint32_t kFirst = 1u << kShift | 1u << 12, kSecond = kFirst >> 4;
  const uint32_t rest = word >> 8;
  pairs[0] = (word & 0x000F000Fu) * kFirst & kBits, pairs[1] = (word & 0x00F000F0u) * kSecond & kBits;
  pairs[2] = (rest & 0x000F000Fu) * kFirst & kBits, pairs[3] = (rest & 0x00F000F0u) * kSecond & kBits;
}

}  // namespace qao::gemm::sm90_skinny
