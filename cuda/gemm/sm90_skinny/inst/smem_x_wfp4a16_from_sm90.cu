// Instantiations of smem_x.cuh for fp4 weights.
#include "gemm/sm90_skinny/smem_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile, int groups>
using Mma = smem::Mma<Tile, __nv_bfloat16, groups, false, DType::kBFloat16, Format::kFp4>;

template <typename Tile>
SmemXKernel of(int groups) {
  using smem::sm90_skinny_smem_x;
  if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(8, false, DType::kBFloat16)) <= kSmemXChunks) {
    if (groups == 8) return &sm90_skinny_smem_x<Mma<Tile, 8>>;
  }
  return &sm90_skinny_smem_x<Mma<Tile, 4>>;
}

constexpr SmemXKernel (*kKernels[])(int) = {
#define QAO_SMEM_X(...) &of<Tile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

SmemXKernel fp4_smem_x_kernel(int config, int groups) { return kKernels[config](groups); }

}  // namespace qao::gemm::sm90_skinny
