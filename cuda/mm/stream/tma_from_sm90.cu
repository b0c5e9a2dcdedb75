// Instantiations of tma.cuh.
#include "mm/stream/tma.cuh"

namespace qao::mm::stream {
namespace {

template <typename Tile, typename T>
constexpr TmaKernel of_x(bool zeros, bool half) {
  using tma::tma_kernel;
  if (zeros) return half ? &tma_kernel<Tile, T, true, true> : &tma_kernel<Tile, T, true, false>;
  return half ? &tma_kernel<Tile, T, false, true> : &tma_kernel<Tile, T, false, false>;
}
template <typename Tile>
constexpr TmaKernel of(bool half_x, bool zeros, bool half) {
  return half_x ? of_x<Tile, __half>(zeros, half) : of_x<Tile, __nv_bfloat16>(zeros, half);
}

constexpr TmaKernel (*kKernels[])(bool, bool, bool) = {
#define QAO_TMA(...) &of<TmaTile<__VA_ARGS__>>,
#include "mm/stream/tma.inc"
#undef QAO_TMA
};

}  // namespace

TmaKernel tma_kernel(int config, bool half_x, bool zeros, bool half) { return kKernels[config](half_x, zeros, half); }

}  // namespace qao::mm::stream
