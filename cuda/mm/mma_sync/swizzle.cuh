// Where rows of a K-tile lie in shared memory.
#pragma once

#include <cstdint>

namespace qao::mm::mma_sync {

// 16-byte chunks of a row are permuted so that neither ldmatrix (rows of 128 bytes) nor 8-byte reads of four rows (of
// 256 bytes) meet bank conflicts.
template <int row_bytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * row_bytes + ((row_bytes == 128 ? chunk ^ (row & 7) : chunk ^ ((row & 3) << 1)) << 4);
}

}  // namespace qao::mm::mma_sync
