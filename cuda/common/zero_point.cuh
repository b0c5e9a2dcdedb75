// A zero point in two parts. Operands are q less the whole part, which is exact in 16 bits and 0 where the weight is 0:
// an outlier of x in such a column adds nothing to the sum. The fraction, times a sum of x, is subtracted from float32
// sums.
#pragma once

#include <cstdint>

namespace qao {

// The nearest integer, within what keeps q - whole in the 8 bits of a bfloat16; NaN gives a bound.
__device__ __forceinline__ float whole_zero(float zero) {
  constexpr float kRound = 0x1.8p23f;  // one step is 1 there
  return fminf(fmaxf((zero + kRound) - kRound, -128.0f), 128.0f);
}
__device__ __forceinline__ float zero_fraction(float zero) { return zero - whole_zero(zero); }

}  // namespace qao
