// Instantiations of resident.cuh for fp4 weights.
#include "mm/stream/resident_fp4.cuh"

namespace qao::mm::stream {
namespace {

template <typename Tile>
ResidentKernel of(int groups) {
  using held::Fp4Product, held::resident_kernel;
  if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(8, false, DType::kBFloat16)) <= kResidentChunks) {
    if (groups == 8) return &resident_kernel<Tile, __nv_bfloat16, Fp4Product<Tile, 8>>;
  }
  return &resident_kernel<Tile, __nv_bfloat16, Fp4Product<Tile, 4>>;
}

constexpr ResidentKernel (*kKernels[])(int) = {
#define QAO_RESIDENT(...) &of<ResidentTile<__VA_ARGS__>>,
#include "mm/stream/resident.inc"
#undef QAO_RESIDENT
};

}  // namespace

ResidentKernel fp4_resident_kernel(int config, int groups) { return kKernels[config](groups); }

}  // namespace qao::mm::stream
