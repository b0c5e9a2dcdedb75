// Split of a float32 x into bfloat16 parts before a GEMM.
#include "common/check.h"
#include "common/float32.cuh"
#include "gemm/launch.h"
#include "gemm/problem.h"

namespace qao::gemm {

Status split_x(const Problem& problem, int partials, const Arguments& arguments, void* stream, X* x) {
  const Workspace layout = workspace_of(problem, partials);
  uint8_t* workspace = static_cast<uint8_t*>(arguments.workspace);
  uint16_t* parts = reinterpret_cast<uint16_t*>(workspace + layout.parts);
  float* sums = layout.x_sums >= 0 ? reinterpret_cast<float*>(workspace + layout.x_sums) : nullptr;
  const int group = static_cast<int>(split_group(problem)), groups = static_cast<int>(ceil_div(problem.k, group));
  split_float32_kernel<<<blocks_of(problem.m * groups * 32, 256), 256, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const float*>(arguments.x), arguments.x_stride, problem.m, static_cast<int>(problem.k), group, groups,
      static_cast<int>(layout.part_stride), parts, sums);
  *x = {parts, kFloat32Parts * layout.part_stride, kFloat32Parts, layout.part_stride, true, sums};
  return launch_status("launching split_float32_kernel");
}

}  // namespace qao::gemm
