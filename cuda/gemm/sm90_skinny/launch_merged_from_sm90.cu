// Launch and instantiations of sm90_skinny_smem_x_merged: several int4 weights, one x.
#include "gemm/sm90_skinny/launch.h"
#include "gemm/sm90_skinny/smem_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
MergedKernel of(int groups, bool has_zeros) {
  return variant(groups, has_zeros, DType::kBFloat16, [&]<int count, bool zeros, DType dtype>() -> MergedKernel {
    if constexpr (dtype != DType::kBFloat16 ||
                  scale_chunks(Tile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kSmemXChunks) {
      return nullptr;
    } else {
      return &smem::sm90_skinny_smem_x_merged<smem::Mma<Tile, __nv_bfloat16, count, zeros, dtype>>;
    }
  });
}

constexpr MergedKernel (*kKernels[])(int, bool) = {
#define QAO_SMEM_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

Status launch_merged(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
                     const X& x, void* stream) {
  const Params params = int4_params(problem, plan, arguments, x);
  const Config& config = kSmemX[plan.config];
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
  SmemXParams partition;
  int shared_bytes;
  if (!smem_x_params(problem, config, static_cast<int>(plan.ctas), static_cast<int>(plan.shared_bytes), &partition,
                     &shared_bytes, passes)) {
    return stale_plan();
  }
  if (problem.gated) {
    partition.next_tile_bytes = of.part[1].weight - of.part[0].weight;
    partition.next_tile_scale_bytes = of.part[1].scales - of.part[0].scales;
  }
  const MergedKernel kernel = kKernels[plan.config](partition.groups_of_step, problem.has_zeros);
  return launch_streaming("launching sm90_skinny_smem_x_merged", kernel, dim3(static_cast<unsigned>(plan.ctas)),
                          nullptr, plan, stream, params, partition, of);
}

}  // namespace qao::gemm::sm90_skinny
