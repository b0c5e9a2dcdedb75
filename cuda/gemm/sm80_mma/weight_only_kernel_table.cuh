// Kernel table of weight_only_tiles.inc.
#include <array>

#include "gemm/sm80_mma/mainloop.cuh"

namespace qao::gemm::sm80_mma {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, one_wave, ...) static_cast<Kernel>(&QAO_KERNEL<X, W, Tile<__VA_ARGS__>, false>),
#include "gemm/sm80_mma/weight_only_tiles.inc"
#undef QAO_TILE
};

template <typename W>
Kernel kernel_of(int row, bool half) {
  return half ? kKernels<__half, W>[row] : kKernels<__nv_bfloat16, W>[row];
}

}  // namespace
}  // namespace qao::gemm::sm80_mma
