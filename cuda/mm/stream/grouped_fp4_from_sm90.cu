// Instantiations of grouped.cuh for fp4 weights.
#include "mm/stream/grouped.cuh"
#include "mm/stream/ring_fp4.cuh"

namespace qao::mm::stream {

GroupedKernel fp4_grouped_kernel(int groups) {
  using x_ring::Fp4Ring, x_ring::grouped_ring_kernel;
  return groups == 8 ? &grouped_ring_kernel<GroupedTile, Fp4Ring<GroupedTile, 8>>
                     : &grouped_ring_kernel<GroupedTile, Fp4Ring<GroupedTile, 4>>;
}

}  // namespace qao::mm::stream
