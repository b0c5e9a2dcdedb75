// Portable kernels on fp8 tensor cores, compiled for sm_89 and as PTX for newer GPUs.
// Tiles that exceed the shared memory of sm_89 are left out, as in plan_fp8().
#include <array>

#include "gemm/sm80_mma/mainloop.cuh"
#include "gemm/sm80_mma/operands.h"

namespace qao::gemm::sm80_mma {
namespace {

template <XKind x, WeightKind weight, typename W, typename Tile>
constexpr Kernel fitting() {
  constexpr OperandBytes kOperands{x == XKind::kQuantizes ? 0 : 1, Product<Fp8Mma, W>::kWeight};
  if constexpr (Tile::ring_bytes(kOperands) <= kFp8SharedBytes) return kernel_for<x, weight, Fp8Mma, W, Tile>();
  return nullptr;
}

template <typename W>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, share, x, weight, ...) fitting<x, weight, W, Tile<__VA_ARGS__>>(),
#include "gemm/sm80_mma/tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_sm89_of(int row, Operands operands) {
  return operands == Operands::kFp8Fp8 ? kKernels<Fp8>[row] : kKernels<Int4>[row];
}

}  // namespace qao::gemm::sm80_mma
