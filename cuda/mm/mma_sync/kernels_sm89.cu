// The portable body on fp8 tensor cores: compiled for sm_89, and as PTX for what is newer.
#include <array>

#include "mm/mma_sync/operands.h"
#include "mm/mma_sync/warp.cuh"

namespace qao::mm::mma_sync {
namespace {

template <typename W>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, share, x, weight, ...) kernel_for<x, weight, Fp8Mma, W, Tile<__VA_ARGS__>>(),
#include "mm/mma_sync/tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_sm89_of(int config, Operands operands) {
  return operands == Operands::kFp8Fp8 ? kKernels<Fp8>[config] : kKernels<Int4>[config];
}

}  // namespace qao::mm::mma_sync
