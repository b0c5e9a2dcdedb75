// Instantiations of resident.cuh for several int4 weights.
#include "mm/stream/resident.cuh"

namespace qao::mm::stream {
namespace {

template <typename Tile, int groups, bool zeros>
MergedKernel of() {
  using T = __nv_bfloat16;
  constexpr int kScaleBytes = step_scale_bytes(groups, zeros, DType::kBFloat16);
  if constexpr (scale_chunks(Tile::kTilesN, kScaleBytes) > kResidentChunks) {
    return nullptr;
  } else {
    return &held::merged_kernel<Tile, T, held::Product<Tile, T, groups, zeros, DType::kBFloat16>>;
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
#define QAO_RESIDENT(...) &of<ResidentTile<__VA_ARGS__>>,
#include "mm/stream/resident.inc"
#undef QAO_RESIDENT
};

}  // namespace

MergedKernel merged_kernel(int config, int groups, bool has_zeros) { return kKernels[config](groups, has_zeros); }

}  // namespace qao::mm::stream
