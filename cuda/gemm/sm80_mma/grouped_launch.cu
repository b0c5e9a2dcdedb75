// Launch of the portable grouped GEMMs.
#include <algorithm>

#include "common/launch.h"
#include "common/shared_memory.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/grouped.h"
#include "gemm/sm80_mma/make_params.h"
#include "gemm/sm80_mma/operands.h"

namespace qao::gemm::sm80_mma {
namespace {

template <typename Params>
Status launch_product(void (*kernel)(Params, Routing), const Plan& plan, const Params& params, const Routing& routing,
                      void* stream) {
  const void* address = reinterpret_cast<const void*>(kernel);
  if (Status status = grant_shared_memory(address); !status.ok()) return status;
  Launch launch{dim3(static_cast<unsigned>(plan.ctas)), dim3(plan.warps * 32), static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = plan.shared_bytes;
  launch.overlapped = is_hopper_code(address);
  return launch_kernel(launch, "launching sm80_mma_grouped", kernel, params, routing);
}

}  // namespace

Status launch_grouped(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
                      const X& x, void* stream) {
  Routing routing = routing_of(problem, plan, experts);
  routing.table_at = static_cast<int>(plan.shared_bytes) - table_bytes(plan.tile_m);
  if (plan.family == Family::kSm80MmaWeightOnly) {
    Int4Params params = int4_params(problem, plan, arguments, x);
    routing.x_stride = params.x_stride, params.x_stride = 0;
    routing.x_sums = is_split(problem) ? x.sums : nullptr;
    const bool half = problem.x_dtype == DType::kFloat16;
    const grouped::WeightOnlyKernel kernel = params.fp4
                                                 ? grouped::wfp4a16_kernel_of(plan.config, half, params.divided)
                                                 : grouped::w4a16_kernel_of(plan.config, half, problem.has_zeros);
    return launch_product(kernel, plan, params, routing, stream);
  }
  Plan dense = plan;
  dense.runs = false;  // a dense persistent run would use all CTAs of the grid
  Params params = params_of(problem, dense, arguments, x);
  if (plan.runs)
    params.run = params.row_tiles / routing.row_blocks, params.more_runs = params.row_tiles % routing.row_blocks;
  routing.x_stride = params.x_stride, params.x_stride = 0;
  const Operands operands = operands_of(problem);
  const grouped::Kernel kernel = plan.config < grouped::kGroupedTilesSm90
                                     ? grouped::kernel_sm90_of(plan.config, operands)
                                     : grouped::kernel_of(plan.config - grouped::kGroupedTilesSm90, operands);
  return launch_product(kernel, plan, params, routing, stream);
}

}  // namespace qao::gemm::sm80_mma
