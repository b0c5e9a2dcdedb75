// Launch of the portable W4A16 kernels.
#include "common/check.h"
#include "common/shared_memory.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/weight_only_kernels.h"
#include "gemm/sm80_mma/weight_only_split_k.cuh"
#include "layout/fp4.h"

namespace qao::gemm::sm80_mma::weight_only {
namespace {

Status launch_product(Kernel kernel, const Plan& plan, const Params& params, cudaStream_t stream) {
  const int shared_bytes = static_cast<int>(plan.shared_bytes);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  const dim3 grid(static_cast<unsigned>(plan.ctas / plan.split_k), plan.split_k);
  kernel<<<grid, plan.warps * 32, shared_bytes, stream>>>(params);
  return launch_status("launching sm80_mma_weight_only");
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace layout = workspace_of(problem, plan.partials);
  const bool finish = layout.partials >= 0;
  Params params = int4_params(problem, plan, arguments, x);
  if (finish) {
    params.bias = nullptr;
    params.y = static_cast<uint8_t*>(arguments.workspace) + layout.partials;
    params.y_dtype = DType::kFloat32;
  }
  const bool half = problem.x_dtype == DType::kFloat16;
  Kernel kernel = nullptr;
  if (problem.weight == Format::kFp4) {
    kernel = fp4_kernel_of(plan.config, half, problem.group_size == fp4::kNvGroup);
  } else {
    kernel = kernel_of(plan.config, half, problem.has_zeros);
  }
  if (Status status = launch_product(kernel, plan, params, stream); !status.ok()) return status;
  if (!finish) return {};

  FinishParams last{};
  last.partials = reinterpret_cast<const float*>(params.y);
  last.splits = plan.split_k;
  last.group_sums = is_split(problem) ? x.sums : nullptr;
  last.scales = arguments.scales;
  last.bias = arguments.bias;
  last.y = arguments.y;
  last.m = problem.m;
  last.n = params.n;
  last.groups = params.groups;
  last.scale_dtype = problem.scale_dtype;
  last.bias_dtype = problem.bias_dtype;
  last.y_dtype = problem.x_dtype;
  sm80_mma_weight_only_reduce<<<blocks_of(problem.m * ((problem.n + 3) / 4), 256), 256, 0, stream>>>(last);
  return launch_status("launching sm80_mma_weight_only_reduce");
}

}  // namespace qao::gemm::sm80_mma::weight_only
