// Split of a zero point into an integer part and a fraction.
//
// Operands are q minus the integer part: exact in 16 bits, and 0 where the weight is 0, so that an outlier of x in that
// column does not affect the accumulator. The fraction times a sum of x is subtracted from float32 sums.
#pragma once

#include <cstdint>

namespace qao {

// Nearest integer, clamped so that q - integer fits the 8 bits of a bfloat16; NaN gives a bound.
__device__ __forceinline__ float whole_zero(float zero) {
  constexpr float kRound = 0x1.8p23f;  // the step of floats at this magnitude is 1
  return fminf(fmaxf((zero + kRound) - kRound, -128.0f), 128.0f);
}
__device__ __forceinline__ float zero_fraction(float zero) { return zero - whole_zero(zero); }

}  // namespace qao
