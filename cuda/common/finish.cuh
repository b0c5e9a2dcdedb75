// What a sum over all of K becomes. Rounded in one way by every body, so that where sums have the same bits y has.
#pragma once

namespace qao {

// x_scale (scale sum - x_zero weight_sum) + bias; 1, 1, 0, 0, 0 where there is none.
__device__ __forceinline__ float finished(float sum, float scale, float x_scale, float x_zero, float weight_sum,
                                          float bias) {
  return __fmaf_rn(x_scale, __fmaf_rn(-x_zero, weight_sum, __fmul_rn(scale, sum)), bias);
}

// int32 sums travel as the floats of the same bits where others are float32.
__device__ __forceinline__ float as_part(float sum) { return sum; }
__device__ __forceinline__ float as_part(int sum) { return __int_as_float(sum); }
__device__ __forceinline__ void add_part(float& total, float part) { total += part; }
__device__ __forceinline__ void add_part(int& total, float part) { total += __float_as_int(part); }

}  // namespace qao
