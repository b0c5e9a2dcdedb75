// Execution of a plan: split float32 x, GEMM, and reduction, at most three kernels on one stream.
#include "common/check.h"
#include "common/float32.cuh"
#include "mm/launch.h"
#include "mm/mma_sync/grouped.h"
#include "mm/problem.h"

namespace qao::mm {
namespace {

// Splits a float32 x into bfloat16 parts and computes the sums that zero points need.
Status split_x(const Problem& problem, const Workspace& layout, const Arguments& arguments, cudaStream_t stream, X* x) {
  uint8_t* workspace = static_cast<uint8_t*>(arguments.workspace);
  uint16_t* parts = reinterpret_cast<uint16_t*>(workspace + layout.parts);
  float* sums = layout.x_sums >= 0 ? reinterpret_cast<float*>(workspace + layout.x_sums) : nullptr;
  const int group = static_cast<int>(split_group(problem)), groups = static_cast<int>(ceil_div(problem.k, group));
  split_float32_kernel<<<blocks_of(problem.m * groups * 32, 256), 256, 0, stream>>>(
      static_cast<const float*>(arguments.x), arguments.x_stride, problem.m, static_cast<int>(problem.k), group, groups,
      static_cast<int>(layout.part_stride), parts, sums);
  *x = {parts, kFloat32Parts * layout.part_stride, kFloat32Parts, layout.part_stride, true, sums};
  return launch_status("launching split_float32_kernel");
}

// Converts x into the format that the kernel reads.
Status prepare_x(const Problem& problem, const Workspace& layout, const Arguments& arguments, void* stream, X* x) {
  *x = {arguments.x, arguments.x_stride, 1, 0, problem.x_aligned || problem.quantizes_x, arguments.x_sums};
  if (!is_split(problem) || problem.m == 0) return {};
  return split_x(problem, layout, arguments, static_cast<cudaStream_t>(stream), x);
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
              void* stream) {
  if (experts.rows == 0) return {};
  X x;
  Status status = prepare_x(problem, workspace_of(problem, 0), arguments, stream, &x);
  if (!status.ok()) return status;
  if (plan.body == Body::kStreamRing || plan.body == Body::kStreamTma)
    return stream::launch(problem, plan, arguments, experts, x, stream);
  if (plan.body == Body::kWgmma) return wgmma::launch(problem, plan, arguments, experts, x, stream);
  return mma_sync::grouped::launch(problem, plan, arguments, experts, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              void* stream) {
  const X x{arguments.x, arguments.x_stride, 1, 0, problem.x_aligned, nullptr};
  return stream::launch(problem, plan, arguments, parts, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream) {
  if (problem.m == 0) return {};
  X x;
  Status status = prepare_x(problem, workspace_of(problem, plan), arguments, stream, &x);
  if (!status.ok()) return status;
  switch (plan.body) {
    case Body::kStreamResident:
    case Body::kStreamTma:
    case Body::kStreamRing:
      return stream::launch(problem, plan, arguments, x, stream);
    case Body::kWgmma:
      return wgmma::launch(problem, plan, arguments, x, stream);
    case Body::kMmaSync:
    case Body::kMmaSyncFp8:
      return mma_sync::launch(problem, plan, arguments, x, stream);
    case Body::kMmaSyncFloatInt4:
      return mma_sync::float_int4::launch(problem, plan, arguments, x, stream);
  }
  return Status::error("the plan names no kernel body");
}

}  // namespace qao::mm
