// Launch of a skinny-GEMM kernel.
//
// With PDL, weights are prefetched before the previous kernel ends. Launch functions compute kernel parameters from the
// plan with the functions that plan() used.
#pragma once

#include "common/launch.h"
#include "common/shared_memory.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm90_skinny/kernels.h"

namespace qao::gemm::sm90_skinny {

// The weights of `streamed` are evicted first from L2. With null their access policy is left alone.
template <typename... Partition>
Status launch_streaming(const char* doing, void (*kernel)(Params, Partition...), dim3 grid, const Problem* streamed,
                        const Plan& plan, void* stream, const Params& params, const Partition&... partition) {
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  Launch launch{grid, dim3(plan.warps * 32), static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = plan.shared_bytes;
  launch.cluster = plan.split_k;
  launch.overlapped = true;
  if (streamed != nullptr) launch.streamed = params.weight, launch.streamed_bytes = weight_bytes(*streamed);
  return launch_kernel(launch, doing, kernel, params, partition...);
}

// The number of clusters of a plan.
inline int clusters_of(const Plan& plan) { return static_cast<int>(plan.ctas / plan.split_k); }

inline Status stale_plan() {
  return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
}

}  // namespace qao::gemm::sm90_skinny
