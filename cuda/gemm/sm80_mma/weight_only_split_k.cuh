// Reduction of split-K partial sums of the portable W4A16 kernels, in a fixed order.
#pragma once

#include "common/convert.cuh"
#include "gemm/sm80_mma/weight_only_fraction.cuh"
#include "qao/gemm.h"

namespace qao::gemm::sm80_mma::weight_only {

struct FinishParams {
  const float* partials;  // [splits, m, n]
  int splits;
  const float* group_sums;  // [m, groups] sums of x, for fractions of zero points (float32 x); else null
  const void* scales;       // packed, read only with group_sums
  const void* bias;         // [n] or null
  void* y;
  int64_t m;
  int n, groups;
  DType scale_dtype, bias_dtype, y_dtype;
};

// A thread handles four rows of W of one token. y = sum of splits - sum over groups of scale fraction sum(x) + bias.
__global__ void __launch_bounds__(256) sm80_mma_weight_only_reduce(const FinishParams p) {
  const int quads = (p.n + 3) / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t m = index / quads;
  const int n = static_cast<int>(index % quads) * 4;
  if (m >= p.m) return;
  const int count = min(4, p.n - n);
  const bool vector = p.n % 4 == 0;
  const int64_t at = m * p.n + n;

  float value[4] = {};
  for (int s = 0; s < p.splits; ++s) {
    const float* partial = p.partials + s * p.m * p.n + at;
    if (vector) {
      const float4 four = *reinterpret_cast<const float4*>(partial);
      value[0] += four.x, value[1] += four.y, value[2] += four.z, value[3] += four.w;
    } else {
      for (int e = 0; e < count; ++e) value[e] += partial[e];
    }
  }
  if (p.group_sums != nullptr) {
    add_fractions(p.scales, p.scale_dtype, p.groups, n, p.group_sums + m * p.groups, value);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (p.bias != nullptr && e < count) value[e] += load_float(p.bias, n + e, p.bias_dtype);
    if (!vector && e < count) store_float(p.y, at + e, p.y_dtype, value[e]);
  }
  if (vector) store_float4(p.y, at, p.y_dtype, value);
}

}  // namespace qao::gemm::sm80_mma::weight_only
