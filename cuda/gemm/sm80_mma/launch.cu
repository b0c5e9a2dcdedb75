// Launch of the portable kernels.
#include "common/check.h"
#include "common/launch.h"
#include "common/shared_memory.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/make_params.h"
#include "gemm/sm80_mma/operands.h"
#include "gemm/sm80_mma/params.h"

namespace qao::gemm::sm80_mma {
namespace {

Kernel kernel_of(const Problem& problem, const Plan& plan) {
  const Operands operands = operands_of(problem);
  if (plan.config < kTilesSm90) return kernel_sm90_of(plan.config, operands);
  const int row = plan.config - kTilesSm90;
  return plan.family == Family::kSm89Mma ? kernel_sm89_of(row, operands) : kernel_of(row, operands);
}

Status launch_product(Kernel kernel, const Problem& problem, const Plan& plan, const Params& params,
                      cudaStream_t stream) {
  const void* address = reinterpret_cast<const void*>(kernel);
  if (Status status = grant_shared_memory(address); !status.ok()) return status;
  Launch launch{dim3(static_cast<unsigned>(plan.ctas / plan.split_k), plan.split_k), dim3(plan.warps * 32), stream};
  launch.shared_bytes = plan.shared_bytes;
  launch.overlapped = is_hopper_code(address);
  if (launch.overlapped && problem.m <= plan.tile_m) {
    launch.streamed = params.weight, launch.streamed_bytes = weight_bytes(problem);
  }
  return launch_kernel(launch, "launching sm80_mma", kernel, params);
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace layout = workspace_of(problem, plan);
  Params params = params_of(problem, plan, arguments, x);
  if (layout.partials >= 0) {
    params.epilogue.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(arguments.workspace) + layout.partials);
  }
  if (Status status = launch_product(kernel_of(problem, plan), problem, plan, params, stream); !status.ok())
    return status;
  if (layout.partials < 0) return {};

  Epilogue last = params.epilogue;
  last.partials = nullptr;
  sm80_mma_reduce<<<blocks_of(problem.m * ((problem.n + 3) / 4), 256), 256, 0, stream>>>(params.epilogue.partials,
                                                                                         plan.split_k, last);
  return launch_status("launching sm80_mma_reduce");
}

}  // namespace qao::gemm::sm80_mma
