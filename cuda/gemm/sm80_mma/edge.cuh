// Copies of unaligned rows and of row ends to shared memory.
#pragma once

#include "common/ptx.cuh"

namespace qao::gemm::sm80_mma {

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

}  // namespace qao::gemm::sm80_mma
