// Launch of the grouped skinny-GEMM kernels.
#include "gemm/sm90_skinny/grouped.h"
#include "gemm/sm90_skinny/launch.h"

namespace qao::gemm::sm90_skinny {

Status launch_grouped(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
                      const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  const Routing routing = routing_of(problem, plan, experts);
  const Spread spread = spread_of(problem, plan);
  const unsigned ctas = static_cast<unsigned>(plan.ctas);
  const int room = static_cast<int>(plan.shared_bytes);
  int shared_bytes;
  if (RingXParams partition;
      plan.family == Family::kSm90SkinnyRingX && grouped_ring_x_params(problem, room, &partition, &shared_bytes)) {
    const GroupedRingXKernel of =
        params.fp4 ? fp4_grouped_ring_x_kernel(partition.groups_of_step)
                   : grouped_ring_x_kernel(partition.groups_of_step, problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching sm90_skinny_grouped_ring_x", of, dim3(1, ctas), nullptr, plan, stream, params,
                            partition, routing, spread);
  }
  if (TmaXParams partition; plan.family == Family::kSm90SkinnyTmaX &&
                            grouped_tma_x_params(problem, plan.config, room, &partition, &shared_bytes)) {
    const GroupedTmaXKernel of =
        grouped_tma_x_kernel(plan.config, problem.has_zeros, problem.scale_dtype == DType::kFloat16);
    return launch_streaming("launching sm90_skinny_grouped_tma_x", of, dim3(ctas), nullptr, plan, stream, params,
                            partition, routing, spread);
  }
  return stale_plan();
}

}  // namespace qao::gemm::sm90_skinny
