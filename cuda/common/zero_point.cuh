// A zero point in two parts. Operands take the whole one off: q - whole is exact in 16 bits, and 0 where a weight is 0,
// so nothing of an outlier of x stands in a sum beside it. The fraction comes off float32 sums, times a sum of x.
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
