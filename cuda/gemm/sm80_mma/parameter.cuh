// Access to one scale or zero of an int4 weight in shared memory, read as the word that holds it.
#pragma once

#include <cuda_fp16.h>

#include "common/ptx.cuh"
#include "qao/types.h"

namespace qao::gemm::sm80_mma {

// Selector for __byte_perm that moves the parameter of a row to its position in a float32 or float16.
__device__ __forceinline__ uint32_t select_parameter(DType dtype, int row) {
  if (dtype == DType::kFloat32) return 0x3210;
  if (dtype == DType::kFloat16) return row % 2 == 0 ? 0x4410 : 0x4432;
  return row % 2 == 0 ? 0x1044 : 0x3244;
}
__device__ __forceinline__ float load_parameter(uint32_t at, uint32_t select, DType dtype) {
  const uint32_t bits = __byte_perm(ptx::load_shared_word(at), 0, select);
  return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits))) : __uint_as_float(bits);
}

}  // namespace qao::gemm::sm80_mma
