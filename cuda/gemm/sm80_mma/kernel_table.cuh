// Kernel table of one tile list: QAO_TILES is tiles.inc or tiles_sm90.inc.
#include <array>

#include "gemm/sm80_mma/mainloop.cuh"

namespace qao::gemm::sm80_mma {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, share, x, weight, ...) kernel_for<x, weight, X, W, Tile<__VA_ARGS__>>(),
#include QAO_TILES
#undef QAO_TILE
};

constexpr decltype(kKernels<Int8, Int8>)* kOfOperands[] = {
#define QAO_OPERANDS(name, x, weight, ...) &kKernels<x, weight>,
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
};

}  // namespace
}  // namespace qao::gemm::sm80_mma
