// Instantiations of mainloop_ring_x.cuh for int4 weights.
#include "gemm/sm90_skinny/mainloop_ring_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
RingXKernel of(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> RingXKernel {
    return &ring_x::sm90_skinny_ring_x<Tile, ring_x::Ring<Tile, count, zeros, dtype>>;
  });
}

constexpr RingXKernel (*kKernels[])(int, bool, DType) = {
#define QAO_RING_X(stages, ...) &of<RingXTile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_ring_x.inc"
#undef QAO_RING_X
};

}  // namespace

RingXKernel ring_x_kernel(int config, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](groups, has_zeros, scale_dtype);
}

}  // namespace qao::gemm::sm90_skinny
