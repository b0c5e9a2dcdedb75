// Shared memory of the mma.sync kernels: swizzle, copies of row ends, access to a scale or zero point.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "qao/types.h"

namespace qao::gemm::sm80_mma {

// Permutes the 16-byte chunks of a row so that neither ldmatrix (128-byte rows) nor 8-byte reads of four rows (256-byte
// rows) have bank conflicts.
template <int row_bytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * row_bytes + ((row_bytes == 128 ? chunk ^ (row & 7) : chunk ^ ((row & 3) << 1)) << 4);
}

// Copies 16 bytes of a row that has `columns` elements left from its first chunk on, zero-filled past them. `from`
// points to chunk `chunk` of the row.
template <typename Element>
__device__ __forceinline__ void fetch_edge_chunk(uint32_t to, const uint8_t* from, int chunk, int columns,
                                                 bool aligned) {
  constexpr int kElements = 16 / sizeof(Element);
  const int count = max(0, min(columns - chunk * kElements, kElements));
  if (aligned && (count == 0 || count == kElements)) {  // memcheck counts a partial copy as 16 bytes
    ptx::cp_async_16(to, count > 0 ? from : from - chunk * 16, count > 0);
  } else {
    alignas(16) Element values[kElements];
#pragma unroll
    for (int i = 0; i < kElements; ++i) {
      values[i] = i < count ? reinterpret_cast<const Element*>(from)[i] : Element{0};
    }
    ptx::store_shared_16(to, *reinterpret_cast<const uint4*>(values));
  }
}

// Selector for __byte_perm that moves the parameter of a row to its position in a float32 or float16.
__device__ __forceinline__ uint32_t select_parameter(DType dtype, int row) {
  if (dtype == DType::kFloat32) return 0x3210;
  if (dtype == DType::kFloat16) return row % 2 == 0 ? 0x4410 : 0x4432;
  return row % 2 == 0 ? 0x1044 : 0x3244;
}
// One scale or zero point of an int4 weight, read as the word that holds it.
__device__ __forceinline__ float load_parameter(uint32_t at, uint32_t select, DType dtype) {
  const uint32_t bits = __byte_perm(ptx::load_shared_word(at), 0, select);
  return dtype == DType::kFloat16 ? __half2float(__ushort_as_half(static_cast<uint16_t>(bits))) : __uint_as_float(bits);
}

}  // namespace qao::gemm::sm80_mma
