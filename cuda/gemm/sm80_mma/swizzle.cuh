// Shared-memory swizzle of the rows of a K-tile.
#pragma once

#include <cstdint>

namespace qao::gemm::sm80_mma {

// Permutes the 16-byte chunks of a row so that neither ldmatrix (128-byte rows) nor 8-byte reads of four rows (256-byte
// rows) have bank conflicts.
template <int row_bytes>
__device__ __forceinline__ uint32_t swizzled(int row, int chunk) {
  return row * row_bytes + ((row_bytes == 128 ? chunk ^ (row & 7) : chunk ^ ((row & 3) << 1)) << 4);
}

}  // namespace qao::gemm::sm80_mma
