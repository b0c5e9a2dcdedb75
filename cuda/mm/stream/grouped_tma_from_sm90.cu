// Instantiations of grouped_tma.cuh.
#include "mm/stream/grouped_tma.cuh"

namespace qao::mm::stream {
namespace {

template <typename Tile>
GroupedTmaKernel kernel_of(bool zeros, bool half) {
  using tma::grouped_tma_kernel;
  if (zeros) return half ? &grouped_tma_kernel<Tile, true, true> : &grouped_tma_kernel<Tile, true, false>;
  return half ? &grouped_tma_kernel<Tile, false, true> : &grouped_tma_kernel<Tile, false, false>;
}

}  // namespace

GroupedTmaKernel grouped_tma_kernel(int config, bool zeros, bool half) {
  using std::tuple_element_t;
  return config == 0 ? kernel_of<tuple_element_t<0, GroupedTmaTiles>>(zeros, half)
                     : kernel_of<tuple_element_t<1, GroupedTmaTiles>>(zeros, half);
}

}  // namespace qao::mm::stream
