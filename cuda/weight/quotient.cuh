// Quotients as IEEE 754 rounds them, for many values by one scale.
#pragma once

namespace qao::weight {

// The product with the reciprocal, twice corrected by the remainder, which fused products give exactly: after the first
// time it is next to the quotient, after the second the nearest (Markstein, IBM J. Res. Dev. 34, 1990).
// Where remainders could be subnormal, by division.
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
