// Launch and instantiations of sm89_mma: fp8 tensor cores, compiled for sm_89 and as PTX for newer GPUs.
// Tiles that exceed the shared memory of sm_89 are left out, as in plan_sm89().
#define QAO_KERNEL sm89_mma
#include <array>

#include "gemm/launch.h"
#include "gemm/sm80_mma/launch.h"
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

Status launch_sm89(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const int row = plan.config - kTilesSm90;
  const Kernel kernel = operands_of(problem) == Operands::kFp8Fp8 ? kKernels<Fp8>[row] : kKernels<Int4>[row];
  return launch_kernel(kernel, problem, plan, arguments, x, stream);
}

}  // namespace qao::gemm::sm80_mma
