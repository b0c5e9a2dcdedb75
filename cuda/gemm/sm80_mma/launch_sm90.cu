// Launch and instantiations of sm90_mma: tiles for Hopper.
#define QAO_KERNEL sm90_mma
#define QAO_TILES "gemm/sm80_mma/tiles_sm90.inc"
#include "gemm/launch.h"
#include "gemm/sm80_mma/kernel_table.cuh"
#include "gemm/sm80_mma/launch.h"
#include "gemm/sm80_mma/operands.h"

namespace qao::gemm::sm80_mma {

Status launch_sm90(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Kernel kernel = (*kOfOperands[static_cast<int>(operands_of(problem))])[plan.config];
  return launch_kernel(kernel, problem, plan, arguments, x, stream);
}

}  // namespace qao::gemm::sm80_mma
