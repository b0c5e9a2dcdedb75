// Instantiations of mainloop_smem_x.cuh for int4 weights.
#include "gemm/sm90_skinny/mainloop_smem_x.cuh"
#include "gemm/sm90_skinny/static_dispatch.h"

namespace qao::gemm::sm90_skinny {
namespace {

template <typename Tile>
SmemXKernel of(bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> SmemXKernel {
    using smem::Product, smem::sm90_skinny_smem_x;
    if constexpr (scale_chunks(Tile::kTilesN, step_scale_bytes(count, zeros, dtype)) > kSmemXChunks) {
      return nullptr;
    } else {
      if (half_x) return &sm90_skinny_smem_x<Tile, __half, Product<Tile, __half, count, zeros, dtype>>;
      return &sm90_skinny_smem_x<Tile, __nv_bfloat16, Product<Tile, __nv_bfloat16, count, zeros, dtype>>;
    }
  });
}

constexpr SmemXKernel (*kKernels[])(bool, int, bool, DType) = {
#define QAO_SMEM_X(...) &of<SmemXTile<__VA_ARGS__>>,
#include "gemm/sm90_skinny/tiles_smem_x.inc"
#undef QAO_SMEM_X
};

}  // namespace

SmemXKernel smem_x_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](half_x, groups, has_zeros, scale_dtype);
}

}  // namespace qao::gemm::sm90_skinny
