// Instantiations of resident.cuh for int4 weights.
#include "mm/stream/resident.cuh"
#include "mm/stream/variants.h"

namespace qao::mm::stream {
namespace {

template <typename Tile>
ResidentKernel of(bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> ResidentKernel {
    using held::Product, held::resident_kernel;
    if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kResidentChunks) {
      return nullptr;
    } else {
      if (half_x) return &resident_kernel<Tile, __half, Product<Tile, __half, count, zeros, dtype>>;
      return &resident_kernel<Tile, __nv_bfloat16, Product<Tile, __nv_bfloat16, count, zeros, dtype>>;
    }
  });
}

constexpr ResidentKernel (*kKernels[])(bool, int, bool, DType) = {
#define QAO_RESIDENT(...) &of<ResidentTile<__VA_ARGS__>>,
#include "mm/stream/resident.inc"
#undef QAO_RESIDENT
};

}  // namespace

ResidentKernel resident_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](half_x, groups, has_zeros, scale_dtype);
}

}  // namespace qao::mm::stream
