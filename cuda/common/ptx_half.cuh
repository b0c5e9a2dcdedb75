// Wrappers of PTX instructions for weight quantization, as in ptx.cuh.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::ptx {

// 1 / x with an error of one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// Pairwise maximum and minimum of 16-bit floats; NaN if either operand is NaN.
template <DType dtype>
__device__ __forceinline__ uint32_t max_or_nan2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (dtype == DType::kBFloat16) {
    asm("max.NaN.bf16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("max.NaN.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}
template <DType dtype>
__device__ __forceinline__ uint32_t min_or_nan2(uint32_t a, uint32_t b) {
  uint32_t result;
  if constexpr (dtype == DType::kBFloat16) {
    asm("min.NaN.bf16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  } else {
    asm("min.NaN.f16x2 %0, %1, %2;\n" : "=r"(result) : "r"(a), "r"(b));
  }
  return result;
}

}  // namespace qao::ptx
