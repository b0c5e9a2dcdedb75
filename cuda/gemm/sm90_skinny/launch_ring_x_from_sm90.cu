// Launch of sm90_skinny_ring_x, and its instantiations for int4 weights.
#include "gemm/sm90_skinny/launch.h"
#include "gemm/sm90_skinny/ring_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
RingXKernel of(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> RingXKernel {
    return &ring_x::sm90_skinny_ring_x<ring_x::Mma<Tile, count, zeros, dtype>>;
  });
}

constexpr RingXKernel (*kKernels[])(int, bool, DType) = {
#define QAO_RING_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_ring_x.inc"
#undef QAO_RING_X
};

}  // namespace

Status launch_ring_x(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  RingXParams partition;
  int shared_bytes;
  if (!ring_x_params(problem, kRingX[plan.config], plan.split_k, clusters_of(plan), static_cast<int>(plan.shared_bytes),
                     &partition, &shared_bytes)) {
    return stale_plan();
  }
  const int groups = partition.groups_of_step / partition.columns_of_token;
  const RingXKernel kernel = params.fp4 ? fp4_ring_x_kernel(plan.config, groups)
                                        : kKernels[plan.config](groups, problem.has_zeros, problem.scale_dtype);
  return launch_streaming("launching sm90_skinny_ring_x", kernel, dim3(plan.split_k, clusters_of(plan)), &problem, plan,
                          stream, params, partition);
}

}  // namespace qao::gemm::sm90_skinny
