// Fractions of zero points, which the GEMM of a float32 x with int4 W leaves out of its operands.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "gemm/sm80_mma/params.h"
#include "layout/int4.h"

namespace qao::gemm::sm80_mma {

struct Fractions {
  const void* scales;   // packed
  const float* x_sums;  // [m, groups]; null: no fractions
  int groups;
  DType scale_dtype;
};
QAO_HOST_DEVICE Fractions fractions_of(const Params& p) {
  return {p.group_scales, p.parts > 1 ? p.x_sums : nullptr, p.groups, p.scale_dtype};
}

// The negated part of a zero point that Product::read_codes does not subtract for bfloat16 parts of x.
__device__ __forceinline__ float minus_fraction(float zero) {
  using Bfloat16 = Half<__nv_bfloat16>;
  return -(Bfloat16::low(Bfloat16::pair(-Bfloat16::kMagicValue - zero)) + Bfloat16::kMagicValue) - zero;
}

// Adds their contribution to the results of rows n .. n + 3 of W: scale * -fraction * sum of row `m` of x, group by
// group.
__device__ __forceinline__ void add_fractions(const Fractions& of, int n, int64_t m, float (&value)[4]) {
  const float* x_sums = of.x_sums + m * of.groups;
  for (int g = 0; g < of.groups; ++g) {
    const int64_t scale = int4::scale_offset(n, g, of.groups, 2, 0), zero = int4::scale_offset(n, g, of.groups, 2, 1);
#pragma unroll
    for (int e = 0; e < 4; ++e) {  // rows past n are padding of the same n-tile
      value[e] += load_float(of.scales, scale + e, of.scale_dtype) *
                  minus_fraction(load_float(of.scales, zero + e, of.scale_dtype)) * x_sums[g];
    }
  }
}

}  // namespace qao::gemm::sm80_mma
