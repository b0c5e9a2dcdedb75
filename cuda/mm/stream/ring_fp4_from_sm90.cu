// Instantiations of ring.cuh for fp4 weights.
#include "mm/stream/ring_fp4.cuh"

namespace qao::mm::stream {
namespace {

template <typename Tile>
RingKernel of(int groups) {
  using x_ring::Fp4Ring;
  return groups == 8 ? &x_ring::ring_kernel<Tile, Fp4Ring<Tile, 8>> : &x_ring::ring_kernel<Tile, Fp4Ring<Tile, 4>>;
}

constexpr RingKernel (*kKernels[])(int) = {
#define QAO_RING(stages, ...) &of<RingTile<__VA_ARGS__>>,
#include "mm/stream/ring.inc"
#undef QAO_RING
};

}  // namespace

RingKernel fp4_ring_kernel(int config, int groups) { return kKernels[config](groups); }

}  // namespace qao::mm::stream
