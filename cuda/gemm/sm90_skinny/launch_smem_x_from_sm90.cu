// Launch of sm90_skinny_smem_x, and its instantiations for int4 weights.
#include "gemm/sm90_skinny/launch.h"
#include "gemm/sm90_skinny/smem_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
SmemXKernel of(bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> SmemXKernel {
    using smem::Mma, smem::sm90_skinny_smem_x;
    if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kSmemXChunks) {
      return nullptr;
    } else {
      if (half_x) return &sm90_skinny_smem_x<Mma<Tile, __half, count, zeros, dtype>>;
      return &sm90_skinny_smem_x<Mma<Tile, __nv_bfloat16, count, zeros, dtype>>;
    }
  });
}

constexpr SmemXKernel (*kKernels[])(bool, int, bool, DType) = {
#define QAO_SMEM_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

Status launch_smem_x(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  SmemXParams partition;
  int shared_bytes;
  if (!smem_x_params(problem, kSmemX[plan.config], clusters_of(plan), static_cast<int>(plan.shared_bytes), &partition,
                     &shared_bytes)) {
    return stale_plan();
  }
  const int groups = partition.groups_of_step;
  const SmemXKernel kernel = params.fp4 ? fp4_smem_x_kernel(plan.config, groups)
                                        : kKernels[plan.config](problem.x_dtype == DType::kFloat16, groups,
                                                                problem.has_zeros, problem.scale_dtype);
  return launch_streaming("launching sm90_skinny_smem_x", kernel, dim3(clusters_of(plan)), &problem, plan, stream,
                          params, partition);
}

}  // namespace qao::gemm::sm90_skinny
