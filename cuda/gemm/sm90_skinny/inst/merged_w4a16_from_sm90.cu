// Instantiations of mainloop_smem_x.cuh for several int4 weights.
#include "gemm/sm90_skinny/mainloop_smem_x.cuh"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile, int groups, bool zeros>
MergedKernel of() {
  using T = __nv_bfloat16;
  constexpr int kScaleBytes = step_scale_bytes(groups, zeros, DType::kBFloat16);
  if constexpr (scale_chunks(Tile::kTilesN, kScaleBytes) > kSmemXChunks) {
    return nullptr;
  } else {
    return &smem::sm90_skinny_smem_x_merged<Tile, T, smem::Product<Tile, T, groups, zeros, DType::kBFloat16>>;
  }
}

template <typename Tile, bool zeros>
MergedKernel of(int groups) {
  return groups == 1 ? of<Tile, 1, zeros>() : groups == 2 ? of<Tile, 2, zeros>() : of<Tile, 4, zeros>();
}

template <typename Tile>
MergedKernel of(int groups, bool has_zeros) {
  return has_zeros ? of<Tile, true>(groups) : of<Tile, false>(groups);
}

constexpr MergedKernel (*kKernels[])(int, bool) = {
#define QAO_SMEM_X(...) &of<SmemXTile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

MergedKernel merged_kernel(int config, int groups, bool has_zeros) { return kKernels[config](groups, has_zeros); }

}  // namespace qao::gemm::sm90_skinny
