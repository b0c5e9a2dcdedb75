// Portable grouped-GEMM kernels for a float x with 4-bit W.
#include <array>

#include "gemm/sm80_mma/grouped.cuh"
#include "gemm/sm80_mma/weight_only_fp4.cuh"

namespace qao::gemm::sm80_mma::grouped {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_TILE(rows, ...) static_cast<Kernel>(&sm80_mma_grouped<X, W, Tile<__VA_ARGS__>>),
#include "gemm/sm80_mma/grouped_weight_only_tiles.inc"
#undef QAO_TILE
};

template <typename W>
Kernel kernel_of(int row, bool half) {
  return half ? kKernels<__half, W>[row] : kKernels<__nv_bfloat16, W>[row];
}

}  // namespace

Kernel w4a16_kernel_of(int row, bool half, bool zeros) {
  return zeros ? kernel_of<FloatInt4<true>>(row, half) : kernel_of<FloatInt4<false>>(row, half);
}
Kernel wfp4a16_kernel_of(int row, bool half, bool nvfp4) {
  return nvfp4 ? kernel_of<FloatFp4<4>>(row, half) : kernel_of<FloatFp4<2>>(row, half);
}

}  // namespace qao::gemm::sm80_mma::grouped
