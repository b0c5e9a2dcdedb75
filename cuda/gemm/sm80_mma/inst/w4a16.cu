// Instantiations of the portable W4A16 kernels for int4 weights.
#include <array>

#include "gemm/sm80_mma/weight_only_mainloop.cuh"

namespace qao::gemm::sm80_mma::weight_only {
namespace {

template <typename T, bool zeros>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, one_wave, ...) static_cast<Kernel>(&sm80_mma_w4a16<T, Tile<__VA_ARGS__>, zeros>),
#include "gemm/sm80_mma/weight_only_tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_of(int config, bool half, bool zeros) {
  if (half) return zeros ? kKernels<__half, true>[config] : kKernels<__half, false>[config];
  return zeros ? kKernels<__nv_bfloat16, true>[config] : kKernels<__nv_bfloat16, false>[config];
}

}  // namespace qao::gemm::sm80_mma::weight_only
