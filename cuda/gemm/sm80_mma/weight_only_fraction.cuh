// Fractions of zero points, which the GEMM of a float32 x leaves out of its operands.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm80_mma::weight_only {

// The negated part of a zero point that Cta::read_group does not subtract for bfloat16 parts of x.
__device__ __forceinline__ float minus_fraction(float zero) {
  using Bfloat16 = Half<__nv_bfloat16>;
  return -(Bfloat16::low(Bfloat16::pair(-Bfloat16::kMagicValue - zero)) + Bfloat16::kMagicValue) - zero;
}

// Adds their contribution to the results of rows n .. n + 3 of W: scale * -fraction * sum of x, group by group.
__device__ __forceinline__ void add_fractions(const void* scales, DType dtype, int groups, int n, const float* x_sums,
                                              float (&value)[4]) {
  for (int g = 0; g < groups; ++g) {
    const int64_t scale = int4::scale_offset(n, g, groups, 2, 0), zero = int4::scale_offset(n, g, groups, 2, 1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows past n are padding of the same n-tile
      value[e] +=
          load_float(scales, scale + e, dtype) * minus_fraction(load_float(scales, zero + e, dtype)) * x_sums[g];
    }
  }
}

}  // namespace qao::gemm::sm80_mma::weight_only
