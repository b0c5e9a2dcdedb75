// Launch of the kernels for a float x with 4-bit W.
#include "gemm/launch.h"
#include "gemm/sm80_mma/launch.h"
#include "layout/fp4.h"

namespace qao::gemm::sm80_mma::weight_only {

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const bool half = problem.x_dtype == DType::kFloat16;
  const Kernel kernel = problem.weight == Format::kFp4
                            ? wfp4a16_kernel_of(plan.config, half, problem.group_size == fp4::kNvGroup)
                            : w4a16_kernel_of(plan.config, half, problem.has_zeros);
  return launch_kernel(kernel, problem, plan, arguments, x, stream);
}

}  // namespace qao::gemm::sm80_mma::weight_only
