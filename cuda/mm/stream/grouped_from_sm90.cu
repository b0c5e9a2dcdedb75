// Instantiations of grouped.cuh for int4 weights.
#include "mm/stream/grouped.cuh"
#include "mm/stream/variants.h"

namespace qao::mm::stream {

GroupedKernel grouped_kernel(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> GroupedKernel {
    if constexpr (scale_chunks(GroupedTile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kPlainChunks) {
      return nullptr;
    } else {
      return &x_ring::grouped_ring_kernel<GroupedTile, x_ring::Ring<GroupedTile, count, zeros, dtype>>;
    }
  });
}

}  // namespace qao::mm::stream
