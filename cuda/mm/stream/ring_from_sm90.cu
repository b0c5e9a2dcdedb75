// Instantiations of ring.cuh for int4 weights.
#include "mm/stream/ring.cuh"
#include "mm/stream/variants.h"

namespace qao::mm::stream {
namespace {

template <typename Tile>
RingKernel of(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> RingKernel {
    return &x_ring::ring_kernel<Tile, x_ring::Ring<Tile, count, zeros, dtype>>;
  });
}

constexpr RingKernel (*kKernels[])(int, bool, DType) = {
#define QAO_RING(stages, ...) &of<RingTile<__VA_ARGS__>>,
#include "mm/stream/ring.inc"
#undef QAO_RING
};

}  // namespace

RingKernel ring_kernel(int config, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](groups, has_zeros, scale_dtype);
}

}  // namespace qao::mm::stream
