// Instantiations of mainloop_smem_x.cuh for fp4 weights.
#include "gemm/sm90_skinny/mma_fp4.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
SmemXKernel of(int groups) {
  using smem::Fp4Product, smem::sm90_skinny_smem_x;
  if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(8, false, DType::kBFloat16)) <= kSmemXChunks) {
    if (groups == 8) return &sm90_skinny_smem_x<Tile, __nv_bfloat16, Fp4Product<Tile, 8>>;
  }
  return &sm90_skinny_smem_x<Tile, __nv_bfloat16, Fp4Product<Tile, 4>>;
}

constexpr SmemXKernel (*kKernels[])(int) = {
#define QAO_SMEM_X(...) &of<SmemXTile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

SmemXKernel fp4_smem_x_kernel(int config, int groups) { return kKernels[config](groups); }

}  // namespace qao::gemm::sm90_skinny
