// Launch of grouped GEMMs on Hopper: gathers x into the order of y if necessary, then runs the GEMM.
#include "common/launch.h"
#include "gemm/launch.h"
#include "gemm/sm90_ws/gather.cuh"
#include "gemm/sm90_ws/kernel_table.cuh"
#include "gemm/sm90_ws/make_params.h"

namespace qao::gemm::sm90_ws {
namespace {

// Gathers x into the workspace, and points `arguments` and `x` at it.
Status gather(const Problem& problem, const Routing& routing, void* stream, Arguments* arguments, X* x) {
  const Gathered layout(problem, routing.rows);
  uint8_t* workspace = static_cast<uint8_t*>(arguments->workspace);
  const int64_t x_unit = problem.x == Format::kFloat ? 2 : 1, row = x->stride * x_unit;
  // Float rows are copied without padding, since the last row's padding may not exist.
  const bool whole = is_split(problem) || problem.x != Format::kFloat || (x->aligned && problem.k % 8 == 0);
  const int bytes = static_cast<int>(whole ? layout.x_bytes : problem.k * 2), unit = whole ? 16 : 2;
  RowCopies copies{};
  copies.of[0] = {static_cast<const uint8_t*>(x->data), workspace + layout.x, row, layout.x_bytes, bytes / unit, unit};
  const auto numbers = [&](int of, const void* from, int64_t to, int64_t width) {
    if (from == nullptr || width == 0) return static_cast<const void*>(from);
    copies.of[of] = {
        static_cast<const uint8_t*>(from), workspace + to, width * 4, width * 4, static_cast<int>(width), 4};
    return static_cast<const void*>(workspace + to);
  };
  x->sums = static_cast<const float*>(numbers(1, x->sums, layout.sums, layout.sums_width));
  arguments->x_scales = static_cast<const float*>(numbers(2, arguments->x_scales, layout.scales, layout.scales_width));
  arguments->x_zeros = static_cast<const int32_t*>(numbers(3, arguments->x_zeros, layout.zeros, 1));
  x->data = workspace + layout.x;
  x->stride = layout.x_bytes / x_unit;
  Launch launch{blocks_of(routing.rows, kGatherRows), kGatherThreads, static_cast<cudaStream_t>(stream)};
  launch.overlapped = true;
  return launch_kernel(launch, "launching sm90_ws_gather_rows", sm90_ws_gather_rows, routing, copies);
}

}  // namespace

Status launch_grouped(const Problem& problem, const Plan& plan, const Arguments& given, const Experts& experts,
                      const X& of_x, void* stream) {
  if (problem.m == 0) {  // no rows of x: zero-fill y
    const size_t bytes = static_cast<size_t>(experts.rows * problem.n * size_of(problem.y_dtype));
    return cuda_status(cudaMemsetAsync(given.y, 0, bytes, static_cast<cudaStream_t>(stream)), "writing zeros");
  }
  Arguments arguments = given;
  X x = of_x;
  const Routing routing = routing_of(problem, plan, experts);
  if (gathers(problem, experts)) {
    if (Status status = gather(problem, routing, stream, &arguments, &x); !status.ok()) return status;
  }
  Problem sorted = problem;
  sorted.m = experts.rows;
  GroupedParams p{params_of(sorted, plan, arguments, x), routing};
  p.last_x_rows = expert_end_rows(plan.tile_m);
  TensorMaps maps{};
  if (Status status = make_tensor_maps(sorted, plan, arguments, x, p, experts.count, &maps); !status.ok()) {
    return status;
  }
  const KernelFunction<true> kernel = kKernels<true>[plan.config][row_of(problem, kTiles[plan.config])];
  return launch_planned("launching sm90_ws for experts", kernel, plan, kTiles[plan.config].sharers(), stream, p, maps);
}

}  // namespace qao::gemm::sm90_ws
