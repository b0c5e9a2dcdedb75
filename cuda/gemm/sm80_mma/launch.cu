// Launch and instantiations of sm80_mma, for GPUs other than Hopper.
#define QAO_TILES "gemm/sm80_mma/tiles.inc"
#include "gemm/launch.h"
#include "gemm/sm80_mma/kernel_table.cuh"
#include "gemm/sm80_mma/launch.h"
#include "gemm/sm80_mma/operands.h"

namespace qao::gemm::sm80_mma {

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Kernel kernel = (*kOfOperands[static_cast<int>(operands_of(problem))])[plan.config - kTilesSm90];
  return launch_kernel(kernel, problem, plan, arguments, x, stream);
}

}  // namespace qao::gemm::sm80_mma
