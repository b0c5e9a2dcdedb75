// IEEE 754 division of many values by one scale.
#pragma once

namespace qao::weight {

// Multiplies by the reciprocal and corrects twice by the remainder, which FMA computes exactly. After the first
// correction the result is adjacent to the quotient, after the second it is the nearest float (Markstein, IBM J. Res.
// Dev. 34, 1990). Divides where remainders could be subnormal.
struct Divisor {
  float scale, inverse;
  bool plain;

  __device__ __forceinline__ float quotient(float value) const {
    if (plain) return __fdiv_rn(value, scale);
    float q = __fmul_rn(value, inverse);
    q = fmaf(fmaf(-q, scale, value), inverse, q);
    return fmaf(fmaf(-q, scale, value), inverse, q);
  }
};

__device__ __forceinline__ Divisor divisor(float scale) {
  return {scale, __frcp_rn(scale), fabsf(scale) < 0x1p-80f || fabsf(scale) > 0x1p80f};
}

}  // namespace qao::weight
