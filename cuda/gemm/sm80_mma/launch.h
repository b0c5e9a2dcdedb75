// Launch of an mma.sync kernel and, with split-K, of the reduction.
#pragma once

#include "common/launch.h"
#include "common/shared_memory.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/make_params.h"
#include "gemm/sm80_mma/params.h"

namespace qao::gemm::sm80_mma {

// Adds partial sums of the splits of K, in a fixed order, and writes y.
Status reduce(const Params& params, cudaStream_t stream);

inline Status launch_kernel(Kernel kernel, const Problem& problem, const Plan& plan, const Arguments& arguments,
                            const X& x, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Workspace layout = workspace_of(problem, plan.partials);
  Params params = params_of(problem, plan, arguments, x);
  if (layout.partials >= 0) {
    params.epilogue.partials = reinterpret_cast<float*>(static_cast<uint8_t*>(arguments.workspace) + layout.partials);
  }
  const void* address = reinterpret_cast<const void*>(kernel);
  if (Status status = grant_shared_memory(address); !status.ok()) return status;
  Launch launch{dim3(static_cast<unsigned>(plan.ctas / plan.split_k), plan.split_k), dim3(plan.warps * 32), stream};
  launch.shared_bytes = plan.shared_bytes;
  launch.overlapped = is_hopper_code(address);
  if (launch.overlapped && problem.m <= plan.tile_m) {
    launch.streamed = params.weight, launch.streamed_bytes = weight_bytes(problem);
  }
  Status status = qao::launch_kernel(launch, "launching sm80_mma", kernel, params);
  if (!status.ok() || layout.partials < 0) return status;
  return reduce(params, stream);
}

}  // namespace qao::gemm::sm80_mma
