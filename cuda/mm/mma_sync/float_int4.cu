// Instantiations of the portable W4A16 kernels for int4 weights.
#include <array>

#include "mm/mma_sync/float_int4.cuh"

namespace qao::mm::mma_sync::float_int4 {
namespace {

template <typename T, bool zeros>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, one_wave, ...) static_cast<Kernel>(&mm_kernel<T, Tile<__VA_ARGS__>, zeros>),
#include "mm/mma_sync/float_int4_tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_of(int config, bool half, bool zeros) {
  if (half) return zeros ? kKernels<__half, true>[config] : kKernels<__half, false>[config];
  return zeros ? kKernels<__nv_bfloat16, true>[config] : kKernels<__nv_bfloat16, false>[config];
}

}  // namespace qao::mm::mma_sync::float_int4
