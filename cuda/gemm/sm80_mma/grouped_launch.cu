// Launch of the portable grouped GEMMs.
#include "common/launch.h"
#include "common/shared_memory.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/grouped.h"
#include "gemm/sm80_mma/make_params.h"
#include "gemm/sm80_mma/operands.h"
#include "layout/fp4.h"

namespace qao::gemm::sm80_mma {
namespace {

grouped::Kernel kernel_of(const Problem& problem, const Plan& plan) {
  const Operands operands = operands_of(problem);
  const bool half = problem.x_dtype == DType::kFloat16;
  if (is_float_fp4(problem)) {
    return grouped::wfp4a16_kernel_of(plan.config, half, problem.group_size == fp4::kNvGroup);
  }
  if (is_float_int4(problem)) return grouped::w4a16_kernel_of(plan.config, half, problem.has_zeros);
  return plan.config < grouped::kGroupedTilesSm90
             ? grouped::kernel_sm90_of(plan.config, operands)
             : grouped::kernel_of(plan.config - grouped::kGroupedTilesSm90, operands);
}

}  // namespace

Status launch_grouped(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
                      const X& x, void* stream) {
  Routing routing = routing_of(problem, plan, experts);
  routing.table_at = static_cast<int>(plan.shared_bytes) - table_bytes(plan.tile_m);
  Plan dense = plan;
  dense.runs = false;  // a dense persistent run would use all CTAs of the grid
  Params params = params_of(problem, dense, arguments, x);
  if (plan.runs)
    params.run = params.row_tiles / routing.row_blocks, params.more_runs = params.row_tiles % routing.row_blocks;
  routing.x_stride = params.x_stride, params.x_stride = 0;
  const grouped::Kernel kernel = kernel_of(problem, plan);
  const void* address = reinterpret_cast<const void*>(kernel);
  if (Status status = grant_shared_memory(address); !status.ok()) return status;
  Launch launch{dim3(static_cast<unsigned>(plan.ctas)), dim3(plan.warps * 32), static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = plan.shared_bytes;
  launch.overlapped = is_hopper_code(address);
  return launch_kernel(launch, "launching sm80_mma_grouped", kernel, params, routing);
}

}  // namespace qao::gemm::sm80_mma
