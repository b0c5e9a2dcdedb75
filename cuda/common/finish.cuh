// Epilogue arithmetic, shared by all kernels so that equal accumulators give equal bits of y.
#pragma once

namespace qao {

// x_scale (scale sum - x_zero weight_sum) + bias. Unused terms are 1, 1, 0, 0, 0.
__device__ __forceinline__ float finished(float sum, float scale, float x_scale, float x_zero, float weight_sum,
                                          float bias) {
  return __fmaf_rn(x_scale, __fmaf_rn(-x_zero, weight_sum, __fmul_rn(scale, sum)), bias);
}

// Partial sums in float32 buffers. int32 sums are stored bit for bit.
__device__ __forceinline__ float as_part(float sum) { return sum; }
__device__ __forceinline__ float as_part(int sum) { return __int_as_float(sum); }
__device__ __forceinline__ void add_part(float& total, float part) { total += part; }
__device__ __forceinline__ void add_part(int& total, float part) { total += __float_as_int(part); }

}  // namespace qao
