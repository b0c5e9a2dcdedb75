// TMA descriptors (tensor maps), encoded on the host.
//
// The driver's encoder is resolved at run time, so that nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <array>
#include <cstdint>

#include "common/check.h"

namespace qao {

// A three-dimensional tensor: innermost dimension first, contiguous; byte strides of the outer two.
struct TensorShape {
  std::array<cuuint64_t, 3> sizes;
  std::array<cuuint64_t, 2> strides;
  std::array<cuuint32_t, 3> box;
};

// Elements outside the tensor read as zero. With `swizzle` 128B or 64B, rows of a box have that many bytes and their
// 16-byte chunks are permuted by row or by pair of rows.
inline Status encode_tensor_map(CUtensorMap* map, const void* data, CUtensorMapDataType dtype, const TensorShape& shape,
                                CUtensorMapSwizzle swizzle) {
  using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                              const cuuint64_t*, const cuuint32_t*, const cuuint32_t*, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);
  static const Encode encode = [] {
    void* symbol = nullptr;
    cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &symbol, 12000, cudaEnableDefault, &result) !=
        cudaSuccess) {
      symbol = nullptr;
    }
#else
    if (cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &symbol, cudaEnableDefault, &result) != cudaSuccess) {
      symbol = nullptr;
    }
#endif
    return reinterpret_cast<Encode>(symbol);
  }();
  if (encode == nullptr) return Status::error("the CUDA driver has no cuTensorMapEncodeTiled; update it");
  const std::array<cuuint32_t, 3> element_strides = {1, 1, 1};
  const CUresult result = encode(map, dtype, 3, const_cast<void*>(data), shape.sizes.data(), shape.strides.data(),
                                 shape.box.data(), element_strides.data(), CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    return Status::error("cuTensorMapEncodeTiled failed with error " + std::to_string(static_cast<int>(result)));
  }
  return {};
}

}  // namespace qao
