// What the bodies for few tokens do with four rows of a token: their sums in plain arithmetic, and storing them.
#pragma once

#include <cuda_bf16.h>

#include "common/convert.cuh"
#include "int4_mm/kernels.h"
#include "int4_mm/layout.h"
#include "int4_mm/tile.h"

namespace qao::int4_mm {

// Plain float32 arithmetic, by a warp. `Cut` is DecodeParams or FewParams.
template <typename Cut>
__device__ __noinline__ float4 exact(const Params& p, const Cut& d, int n, int token) {
  const int lane = threadIdx.x % 32;
  float sum[4] = {};
  for (int k = lane; k < p.k; k += 32) {
    const float x = __bfloat162float(static_cast<const __nv_bfloat16*>(p.x)[token * p.x_stride + k]);
    const int group =
        (k / kStepColumns * d.groups_of_step + k % kStepColumns * d.groups_of_step / kStepColumns) >> d.group_shift;
    const int parameters = p.group_bytes / (kTileN * size_of(p.scale_dtype));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int q = p.weight[weight_offset(n + e, k, p.k_tiles)] >> tile_shift((n + e) % kTileN) & 15;
      const auto read = [&](int parameter) {
        return load_float(p.scales, scale_offset(n + e, group, p.groups, parameters, parameter), p.scale_dtype);
      };
      sum[e] += (q - (d.zeros ? read(1) : kSymmetricZero)) * read(0) * x;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum[e] += __shfl_xor_sync(0xFFFFFFFFu, sum[e], distance);
  }
  return {sum[0], sum[1], sum[2], sum[3]};
}

// With the bias; rows past N are not stored.
__device__ __forceinline__ void store_rows(const Params& p, int n, int token, float (&value)[4]) {
  const int64_t at = static_cast<int64_t>(token) * p.n + n;
  const bool vector_store = p.n % 4 == 0;
  if (p.bias != nullptr) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < p.n) value[e] += load_float(p.bias, n + e, p.bias_dtype);
    }
  }
  if (vector_store) {
    if (n < p.n) store_float4(p.y, at, p.y_dtype, value);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < p.n) store_float(p.y, at + e, p.y_dtype, value[e]);
    }
  }
}

}  // namespace qao::int4_mm
