// Instantiations of mainloop_tma_x.cuh.
#include "gemm/sm90_skinny/mainloop_tma_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile, typename T>
constexpr TmaXKernel of_x(bool zeros, bool half) {
  using tma_x::sm90_skinny_tma_x;
  if (zeros) return half ? &sm90_skinny_tma_x<Tile, T, true, true> : &sm90_skinny_tma_x<Tile, T, true, false>;
  return half ? &sm90_skinny_tma_x<Tile, T, false, true> : &sm90_skinny_tma_x<Tile, T, false, false>;
}
template <typename Tile>
constexpr TmaXKernel of(bool half_x, bool zeros, bool half) {
  return half_x ? of_x<Tile, __half>(zeros, half) : of_x<Tile, __nv_bfloat16>(zeros, half);
}

constexpr TmaXKernel (*kKernels[])(bool, bool, bool) = {
#define QAO_TMA_X(...) &of<TmaXTile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_tma_x.inc"
#undef QAO_TMA_X
};

}  // namespace

TmaXKernel tma_x_kernel(int config, bool half_x, bool zeros, bool half) {
  return kKernels[config](half_x, zeros, half);
}

}  // namespace qao::gemm::sm90_skinny
