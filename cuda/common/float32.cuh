// Split of float32 activations into bfloat16 parts for tensor cores.
//
// x = high + middle + low exactly, and integer weights are exact in bfloat16, so three MMAs give the float32 result.
#pragma once

#include <cstdint>

#include "common/float32.h"

namespace qao {

__device__ __forceinline__ float truncate_to_bf16(float value) {
  return __uint_as_float(__float_as_uint(value) & 0xFFFF0000u);
}

// One warp per group and token. Writes parts [m, 3, part_stride] and optionally the group's sum of x [m, groups].
static __global__ void __launch_bounds__(256)
    split_float32_kernel(const float* x, int64_t x_stride, int64_t m, int k, int group_size, int groups,
                         int part_stride, uint16_t* parts, float* group_sums) {
  const int64_t warp = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) / 32;
  const int64_t token = warp / groups;
  const int group = static_cast<int>(warp % groups), lane = threadIdx.x % 32;
  if (token >= m) return;
  uint16_t* to = parts + token * kFloat32Parts * part_stride;
  const int64_t first = static_cast<int64_t>(group) * group_size;
  const int end = static_cast<int>(min(first + group_size, static_cast<int64_t>(k)));
  float sum = 0;
  for (int column = static_cast<int>(first) + lane; column < end; column += 32) {
    float rest = x[token * x_stride + column];
    sum += rest;
    const bool finite = isfinite(rest);
#pragma unroll
    for (int part = 0; part < kFloat32Parts; ++part) {
      // The first part of infinity is infinity. A NaN must keep a mantissa bit, or it would become infinity.
      const float piece = isnan(rest) ? __uint_as_float(0x7FC00000u) : truncate_to_bf16(rest);
      to[part * part_stride + column] = static_cast<uint16_t>(__float_as_uint(piece) >> 16);
      rest = finite ? rest - piece : 0.0f;
    }
  }
  // The padding, of less than eight columns, which copies of whole rows read.
  if (group == groups - 1 && k + lane < part_stride) {
#pragma unroll
    for (int part = 0; part < kFloat32Parts; ++part) to[part * part_stride + k + lane] = 0;
  }
  if (group_sums == nullptr) return;
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, distance);
  if (lane == 0) group_sums[token * groups + group] = sum;
}

}  // namespace qao
