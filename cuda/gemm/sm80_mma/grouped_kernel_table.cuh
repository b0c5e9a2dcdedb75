// Kernel table of one tile list: QAO_TILES is grouped_tiles.inc or grouped_tiles_sm90.inc.
#include <array>

#include "gemm/sm80_mma/grouped.cuh"

namespace qao::gemm::sm80_mma::grouped {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_TILE(rows, x, runs, ...) kernel_for<x, X, W, Tile<__VA_ARGS__>>(),
#include QAO_TILES
#undef QAO_TILE
};

constexpr decltype(kKernels<Int8, Int8>)* kOfOperands[] = {
#define QAO_OPERANDS(name, x, weight, ...) &kKernels<x, weight>,
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
};

}  // namespace
}  // namespace qao::gemm::sm80_mma::grouped
