// Instantiations of ring_x.cuh for fp4 weights.
#include "gemm/sm90_skinny/ring_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
RingXKernel of(int groups) {
  using ring_x::Fp4Mma, ring_x::sm90_skinny_ring_x;
  return groups == 8 ? &sm90_skinny_ring_x<Fp4Mma<Tile, 8>> : &sm90_skinny_ring_x<Fp4Mma<Tile, 4>>;
}

constexpr RingXKernel (*kKernels[])(int) = {
#define QAO_RING_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_ring_x.inc"
#undef QAO_RING_X
};

}  // namespace

RingXKernel fp4_ring_x_kernel(int config, int groups) { return kKernels[config](groups); }

}  // namespace qao::gemm::sm90_skinny
