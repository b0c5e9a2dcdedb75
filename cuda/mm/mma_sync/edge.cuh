// Rows that 16-byte loads cannot read, and their ends.
#pragma once

#include "common/ptx.cuh"

namespace qao::mm::mma_sync {

// Copies 16 bytes of a row, of which `columns` elements are left from its first chunk on; zeros past them. `from` is
// where chunk `chunk` of the row lies.
template <typename Element>
__device__ __forceinline__ void fetch_edge_chunk(uint32_t to, const uint8_t* from, int chunk, int columns,
                                                 bool aligned) {
  constexpr int kElements = 16 / sizeof(Element);
  const int count = max(0, min(columns - chunk * kElements, kElements));
  if (aligned && (count == 0 || count == kElements)) {  // memcheck takes a partial copy for 16 bytes
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

}  // namespace qao::mm::mma_sync
