// Loads and stores of scalars with a dtype known only at run time (scales, bias, outputs).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "qao/types.h"

namespace qao {

__device__ __forceinline__ float load_float(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  if (dtype == DType::kBFloat16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[index]);
  return __half2float(static_cast<const __half*>(data)[index]);
}

template <DType dtype>
__device__ __forceinline__ float load_shared_float(uint32_t from) {
  if constexpr (dtype == DType::kFloat32) return ptx::load_shared_float(from);
  const uint16_t bits = ptx::load_shared_2(from);
  if constexpr (dtype == DType::kBFloat16) return __uint_as_float(static_cast<uint32_t>(bits) << 16);
  return __half2float(__ushort_as_half(bits));
}

// Two adjacent elements at once; `from` must be aligned to their size.
template <DType dtype>
__device__ __forceinline__ float2 load_shared_float2(uint32_t from) {
  if constexpr (dtype == DType::kFloat32) return ptx::load_shared_float2(from);
  const uint32_t pair = ptx::load_shared_word(from);
  if constexpr (dtype == DType::kBFloat16) return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xFFFF0000)};
  return __half22float2(*reinterpret_cast<const __half2*>(&pair));
}

__device__ __forceinline__ void store_float(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else if (dtype == DType::kBFloat16) {
    static_cast<__nv_bfloat16*>(data)[index] = __float2bfloat16(value);
  } else {
    static_cast<__half*>(data)[index] = __float2half(value);
  }
}

// Two adjacent elements at once; `data` + index must be aligned to their size.
__device__ __forceinline__ void store_float2(void* data, int64_t index, DType dtype, float2 value) {
  if (dtype == DType::kFloat32) {
    *reinterpret_cast<float2*>(static_cast<float*>(data) + index) = value;
  } else if (dtype == DType::kBFloat16) {
    *reinterpret_cast<__nv_bfloat162*>(static_cast<__nv_bfloat16*>(data) + index) =
        __floats2bfloat162_rn(value.x, value.y);
  } else {
    *reinterpret_cast<__half2*>(static_cast<__half*>(data) + index) = __floats2half2_rn(value.x, value.y);
  }
}

// Four adjacent elements at once; `data` + index must be aligned to their size.
__device__ __forceinline__ void store_float4(void* data, int64_t index, DType dtype, const float (&value)[4]) {
  if (dtype == DType::kFloat32) {
    *reinterpret_cast<float4*>(static_cast<float*>(data) + index) = {value[0], value[1], value[2], value[3]};
  } else if (dtype == DType::kBFloat16) {
    const __nv_bfloat162 low = __floats2bfloat162_rn(value[0], value[1]),
                         high = __floats2bfloat162_rn(value[2], value[3]);
    *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(data) + index) = {*reinterpret_cast<const uint32_t*>(&low),
                                                                            *reinterpret_cast<const uint32_t*>(&high)};
  } else {
    const __half2 low = __floats2half2_rn(value[0], value[1]), high = __floats2half2_rn(value[2], value[3]);
    *reinterpret_cast<uint2*>(static_cast<__half*>(data) + index) = {*reinterpret_cast<const uint32_t*>(&low),
                                                                     *reinterpret_cast<const uint32_t*>(&high)};
  }
}

}  // namespace qao
