// Kernel that adds the sums of slices of K, which the GEMM kernel left in the workspace, and the bias.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "gemm/sm90_ws/params.h"

namespace qao::gemm::sm90_ws {

constexpr int kAddThreads = 256;

// A thread adds four rows of W of one token, in the order of the slices.
__global__ void __launch_bounds__(kAddThreads) sm90_ws_add_slices(const __grid_constant__ Params p) {
  const int quads = (p.n + 3) / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kAddThreads + threadIdx.x, token = index / quads;
  const int n = static_cast<int>(index - token * quads) * 4;
  ptx::wait_then_launch_dependents();
  if (token >= p.m) return;
  const bool whole = p.n % 4 == 0;
  float sum[4] = {};
#pragma unroll 4
  for (int slice = 0; slice < p.slices; ++slice) {
    const float* from = p.partials + (slice * p.m + token) * p.n + n;
    if (whole) {
      const float4 part = *reinterpret_cast<const float4*>(from);
      sum[0] += part.x, sum[1] += part.y, sum[2] += part.z, sum[3] += part.w;
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n + e < p.n) sum[e] += from[e];
      }
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (p.bias != nullptr && n + e < p.n) sum[e] += load_float(p.bias, n + e, p.bias_dtype);
  }
  const int64_t to = token * p.n + n;
  if (whole) {
    store_float4(p.y, to, p.y_dtype, sum);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < p.n) store_float(p.y, to + e, p.y_dtype, sum[e]);
    }
  }
}

}  // namespace qao::gemm::sm90_ws
