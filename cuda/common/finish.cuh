// What a sum over all of K becomes. Rounded in one way by every body, so that where sums have the same bits y has.
#pragma once

namespace qao {

// x_scale scale sum + bias; 1, 1, 0 where there is none.
__device__ __forceinline__ float finished(float sum, float scale, float x_scale, float bias) {
  return __fmaf_rn(x_scale, __fmul_rn(scale, sum), bias);
}

// The sum of a row of W's whole numbers from that of its values. Both are rounded: exact below 2^22. Times a zero point
// of x it comes off a sum of products before anything is rounded, or what is left would be lost beside either.
__device__ __forceinline__ int whole_sum(float weight_sum, float scale) {
  return __float2int_rn(__fdiv_rn(weight_sum, scale));
}

// int32 sums travel as the floats of the same bits where others are float32.
__device__ __forceinline__ float as_part(float sum) { return sum; }
__device__ __forceinline__ float as_part(int sum) { return __int_as_float(sum); }
__device__ __forceinline__ void add_part(float& total, float part) { total += part; }
__device__ __forceinline__ void add_part(int& total, float part) { total += __float_as_int(part); }

}  // namespace qao
