// Instantiations of the portable W4A16 kernels for fp4 weights.
#include <array>

#include "gemm/sm80_mma/weight_only_fp4.cuh"

namespace qao::gemm::sm80_mma::weight_only {
namespace {

template <typename T, int groups>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, one_wave, ...) static_cast<Kernel>(&sm80_mma_wfp4a16<T, Tile<__VA_ARGS__>, groups>),
#include "gemm/sm80_mma/weight_only_tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel fp4_kernel_of(int config, bool half, bool nvfp4) {
  if (half) return nvfp4 ? kKernels<__half, 4>[config] : kKernels<__half, 2>[config];
  return nvfp4 ? kKernels<__nv_bfloat16, 4>[config] : kKernels<__nv_bfloat16, 2>[config];
}

}  // namespace qao::gemm::sm80_mma::weight_only
