// Instantiations of grouped_ring_x.cuh for int4 weights.
#include "gemm/sm90_skinny/grouped_ring_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {

GroupedRingXKernel grouped_ring_x_kernel(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> GroupedRingXKernel {
    if constexpr (scale_chunks(GroupedRingXTile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kPlainChunks) {
      return nullptr;
    } else {
      return &ring_x::sm90_skinny_grouped_ring_x<ring_x::Mma<GroupedRingXTile, count, zeros, dtype>>;
    }
  });
}

}  // namespace qao::gemm::sm90_skinny
