// Wrappers as in ptx.cuh, of what quantising weights needs.
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::ptx {

// 1 / x to one unit in the last place.
__device__ __forceinline__ float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

// Two 16-bit floats at once: the larger ones and the smaller ones; NaN where either is.
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
