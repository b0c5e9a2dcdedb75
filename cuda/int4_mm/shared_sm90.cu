#include "int4_mm/shared.cuh"

namespace qao::int4_mm {
namespace {

template <typename Tile, typename T>
constexpr SharedKernel of_x(bool zeros, bool half) {
  using shared::shared_kernel;
  if (zeros) return half ? &shared_kernel<Tile, T, true, true> : &shared_kernel<Tile, T, true, false>;
  return half ? &shared_kernel<Tile, T, false, true> : &shared_kernel<Tile, T, false, false>;
}
template <typename Tile>
constexpr SharedKernel of(bool half_x, bool zeros, bool half) {
  return half_x ? of_x<Tile, __half>(zeros, half) : of_x<Tile, __nv_bfloat16>(zeros, half);
}

constexpr SharedKernel (*kKernels[])(bool, bool, bool) = {
#define QAO_SHARED(...) &of<SharedTile<__VA_ARGS__>>,
#include "int4_mm/shared.inc"
#undef QAO_SHARED
};

}  // namespace

SharedKernel shared_kernel(int config, bool half_x, bool zeros, bool half) {
  return kKernels[config](half_x, zeros, half);
}

}  // namespace qao::int4_mm
