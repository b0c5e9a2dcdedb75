// Launch of the skinny-GEMM kernels.
// With PDL, weights are prefetched before the previous kernel ends. Kernel parameters are recomputed from the plan by
// the functions that plan() used.
#include <span>

#include "common/launch.h"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm90_skinny/grouped.h"
#include "gemm/sm90_skinny/kernels.h"

namespace qao::gemm::sm90_skinny {
namespace {

// The weights of `streamed` are evicted first from L2. With null their access policy is left alone.
template <typename... Cut>
Status launch_streaming(const char* doing, void (*kernel)(Params, Cut...), dim3 grid, const Problem* streamed,
                        const Plan& plan, cudaStream_t stream, const Params& params, const Cut&... cut) {
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  Launch launch{grid, dim3(plan.warps * 32), stream};
  launch.shared_bytes = plan.shared_bytes;
  launch.cluster = plan.split_k;
  launch.overlapped = true;
  if (streamed != nullptr) launch.streamed = params.weight, launch.streamed_bytes = weight_bytes(*streamed);
  return launch_kernel(launch, doing, kernel, params, cut...);
}

// Tensor map of x [m, k] with boxes of 64 columns and all tokens.
Status make_x_map(const Problem& problem, const Params& params, CUtensorMap* map) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.x_stride) * 2;
  const TensorShape shape{{static_cast<cuuint64_t>(problem.k), 1, static_cast<cuuint64_t>(problem.m)},
                          {row_bytes, row_bytes},
                          {kBoxColumns, 1, static_cast<cuuint32_t>(problem.m)}};
  return encode_tensor_map(map, params.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Params params = int4_params(problem, plan, arguments, x);
  const int clusters = static_cast<int>(plan.ctas / plan.split_k), room = static_cast<int>(plan.shared_bytes);
  const bool half_x = problem.x_dtype == DType::kFloat16;
  int shared_bytes;
  if (RingXParams cut; plan.family == Family::kSm90SkinnyRingX &&
                       ring_x_params(problem, kRingX[plan.config], plan.split_k, clusters, room, &cut, &shared_bytes)) {
    const int groups = cut.groups_of_step / cut.columns_of_token;
    const RingXKernel of = params.fp4 ? fp4_ring_x_kernel(plan.config, groups)
                                      : ring_x_kernel(plan.config, groups, problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching sm90_skinny_ring_x", of, dim3(plan.split_k, clusters), &problem, plan, stream,
                            params, cut);
  }
  if (SmemXParams cut; plan.family == Family::kSm90SkinnySmemX &&
                       smem_x_params(problem, kSmemX[plan.config], clusters, room, &cut, &shared_bytes)) {
    const SmemXKernel of =
        params.fp4 ? fp4_smem_x_kernel(plan.config, cut.groups_of_step)
                   : smem_x_kernel(plan.config, half_x, cut.groups_of_step, problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching sm90_skinny_smem_x", of, dim3(clusters), &problem, plan, stream, params, cut);
  }
  if (TmaXParams cut; plan.family == Family::kSm90SkinnyTmaX &&
                      tma_x_params(problem, kTmaX[plan.config], clusters, room, &cut, &shared_bytes)) {
    CUtensorMap map;
    if (Status status = make_x_map(problem, params, &map); !status.ok()) return status;
    const TmaXKernel of = tma_x_kernel(plan.config, half_x, problem.has_zeros, problem.scale_dtype == DType::kFloat16);
    return launch_streaming("launching sm90_skinny_tma_x", of, dim3(clusters), &problem, plan, stream, params, cut,
                            map);
  }
  return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  const SmemXConfig& config = kSmemX[plan.config];
  MergedParts of{};
  int passes = 0;
  of.count = problem.gated ? 1 : static_cast<int>(parts.size());
  for (int i = 0; i < static_cast<int>(parts.size()); ++i) {
    const Part& part = parts[i];
    of.first_pass[i] = passes;
    if (i < of.count) passes += passes_over_part(part.n, problem.gated, config.tiles_n);
    of.part[i] = {static_cast<const uint8_t*>(part.weight),
                  static_cast<const uint8_t*>(part.scales),
                  part.bias,
                  part.y,
                  static_cast<int>(part.n),
                  static_cast<int>(tiles_n(part.n))};
  }
  SmemXParams cut;
  int shared_bytes;
  if (!smem_x_params(problem, config, static_cast<int>(plan.ctas), static_cast<int>(plan.shared_bytes), &cut,
                     &shared_bytes, passes)) {
    return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
  }
  if (problem.gated) {
    cut.next_tile_bytes = of.part[1].weight - of.part[0].weight;
    cut.next_tile_scale_bytes = of.part[1].scales - of.part[0].scales;
  }
  const MergedKernel kernel = merged_kernel(plan.config, cut.groups_of_step, problem.has_zeros);
  return launch_streaming("launching sm90_skinny_smem_x_merged", kernel, dim3(static_cast<unsigned>(plan.ctas)),
                          nullptr, plan, static_cast<cudaStream_t>(stream), params, cut, of);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Params params = int4_params(problem, plan, arguments, x);
  const Routing routing = routing_of(problem, plan, experts);
  const Spread spread = spread_of(problem, plan);
  const unsigned ctas = static_cast<unsigned>(plan.ctas);
  const int room = static_cast<int>(plan.shared_bytes);
  int shared_bytes;
  if (RingXParams cut;
      plan.family == Family::kSm90SkinnyRingX && grouped_ring_x_params(problem, room, &cut, &shared_bytes)) {
    const GroupedRingXKernel of =
        params.fp4 ? fp4_grouped_ring_x_kernel(cut.groups_of_step)
                   : grouped_ring_x_kernel(cut.groups_of_step, problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching sm90_skinny_grouped_ring_x", of, dim3(1, ctas), nullptr, plan, stream, params,
                            cut, routing, spread);
  }
  if (TmaXParams cut;
      plan.family == Family::kSm90SkinnyTmaX && grouped_tma_x_params(problem, plan.config, room, &cut, &shared_bytes)) {
    const GroupedTmaXKernel of =
        grouped_tma_x_kernel(plan.config, problem.has_zeros, problem.scale_dtype == DType::kFloat16);
    return launch_streaming("launching sm90_skinny_grouped_tma_x", of, dim3(ctas), nullptr, plan, stream, params, cut,
                            routing, spread);
  }
  return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
}

}  // namespace qao::gemm::sm90_skinny
