// Execution of a plan: split float32 x, GEMM, and reduction, at most three kernels on one stream.
#include "common/check.h"
#include "common/float32.cuh"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/grouped.h"

namespace qao::gemm {
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
  if (plan.family == Family::kSm90SkinnyRingX || plan.family == Family::kSm90SkinnyTmaX)
    return sm90_skinny::launch(problem, plan, arguments, experts, x, stream);
  if (plan.family == Family::kSm90Ws) return sm90_ws::launch(problem, plan, arguments, experts, x, stream);
  return sm80_mma::grouped::launch(problem, plan, arguments, experts, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              void* stream) {
  const X x{arguments.x, arguments.x_stride, 1, 0, problem.x_aligned, nullptr};
  return sm90_skinny::launch(problem, plan, arguments, parts, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream) {
  if (problem.m == 0) return {};
  X x;
  Status status = prepare_x(problem, workspace_of(problem, plan), arguments, stream, &x);
  if (!status.ok()) return status;
  switch (plan.family) {
    case Family::kSm90SkinnySmemX:
    case Family::kSm90SkinnyTmaX:
    case Family::kSm90SkinnyRingX:
      return sm90_skinny::launch(problem, plan, arguments, x, stream);
    case Family::kSm90Ws:
      return sm90_ws::launch(problem, plan, arguments, x, stream);
    case Family::kSm80Mma:
    case Family::kSm89Mma:
      return sm80_mma::launch(problem, plan, arguments, x, stream);
    case Family::kSm80MmaWeightOnly:
      return sm80_mma::weight_only::launch(problem, plan, arguments, x, stream);
  }
  return Status::error("the plan names no kernel family");
}

}  // namespace qao::gemm
