// Instantiations of grouped_ring_x.cuh for fp4 weights.
#include "gemm/sm90_skinny/grouped_ring_x.cuh"

namespace qao::gemm::sm90_skinny {

GroupedRingXKernel fp4_grouped_ring_x_kernel(int groups) {
  using ring_x::Fp4Mma, ring_x::sm90_skinny_grouped_ring_x;
  return groups == 8 ? &sm90_skinny_grouped_ring_x<Fp4Mma<GroupedRingXTile, 8>>
                     : &sm90_skinny_grouped_ring_x<Fp4Mma<GroupedRingXTile, 4>>;
}

}  // namespace qao::gemm::sm90_skinny
