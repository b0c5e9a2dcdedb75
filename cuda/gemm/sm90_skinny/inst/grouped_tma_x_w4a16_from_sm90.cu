// Instantiations of grouped_tma_x.cuh.
#include "gemm/sm90_skinny/grouped_tma_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile, bool zeros, bool half>
constexpr GroupedTmaXKernel kOf = &tma_x::sm90_skinny_grouped_tma_x<tma_x::Mma<Tile, __nv_bfloat16, zeros, half>>;

template <typename Tile>
GroupedTmaXKernel kernel_of(bool zeros, bool half) {
  if (zeros) return half ? kOf<Tile, true, true> : kOf<Tile, true, false>;
  return half ? kOf<Tile, false, true> : kOf<Tile, false, false>;
}

}  // namespace

GroupedTmaXKernel grouped_tma_x_kernel(int config, bool zeros, bool half) {
  using std::tuple_element_t;
  return config == 0 ? kernel_of<tuple_element_t<0, GroupedTmaXTiles>>(zeros, half)
                     : kernel_of<tuple_element_t<1, GroupedTmaXTiles>>(zeros, half);
}

}  // namespace qao::gemm::sm90_skinny
