// Launch and instantiations of sm90_skinny_tma_x.
#include "common/tensor_map.h"
#include "gemm/sm90_skinny/launch.h"
#include "gemm/sm90_skinny/tma_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile, typename T>
constexpr TmaXKernel of_x(bool zeros, bool half) {
  using tma_x::Mma, tma_x::sm90_skinny_tma_x;
  if (zeros) return half ? &sm90_skinny_tma_x<Mma<Tile, T, true, true>> : &sm90_skinny_tma_x<Mma<Tile, T, true, false>>;
  return half ? &sm90_skinny_tma_x<Mma<Tile, T, false, true>> : &sm90_skinny_tma_x<Mma<Tile, T, false, false>>;
}
template <typename Tile>
constexpr TmaXKernel of(bool half_x, bool zeros, bool half) {
  return half_x ? of_x<Tile, __half>(zeros, half) : of_x<Tile, __nv_bfloat16>(zeros, half);
}

constexpr TmaXKernel (*kKernels[])(bool, bool, bool) = {
#define QAO_TMA_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_tma_x.inc"
#undef QAO_TMA_X
};

// Tensor map of x [m, k] with boxes of 64 columns and all tokens.
Status make_x_map(const Problem& problem, const Params& params, CUtensorMap* map) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.x_stride) * 2;
  const TensorShape shape{{static_cast<cuuint64_t>(problem.k), 1, static_cast<cuuint64_t>(problem.m)},
                          {row_bytes, row_bytes},
                          {kBoxColumns, 1, static_cast<cuuint32_t>(problem.m)}};
  return encode_tensor_map(map, params.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace

Status launch_tma_x(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  TmaXParams partition;
  int shared_bytes;
  if (!tma_x_params(problem, kTmaX[plan.config], clusters_of(plan), static_cast<int>(plan.shared_bytes), &partition,
                    &shared_bytes)) {
    return stale_plan();
  }
  CUtensorMap map;
  if (Status status = make_x_map(problem, params, &map); !status.ok()) return status;
  const TmaXKernel kernel = kKernels[plan.config](problem.x_dtype == DType::kFloat16, problem.has_zeros,
                                                  problem.scale_dtype == DType::kFloat16);
  return launch_streaming("launching sm90_skinny_tma_x", kernel, dim3(clusters_of(plan)), &problem, plan, stream,
                          params, partition, map);
}

}  // namespace qao::gemm::sm90_skinny
