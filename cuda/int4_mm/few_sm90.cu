#include "int4_mm/few.cuh"
#include "int4_mm/variants.h"

namespace qao::int4_mm {
namespace {

template <typename Tile>
FewKernel of(bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> FewKernel {
    if (half_x) return &few::few_kernel<Tile, __half, count, zeros, dtype>;
    return &few::few_kernel<Tile, __nv_bfloat16, count, zeros, dtype>;
  });
}

constexpr FewKernel (*kKernels[])(bool, int, bool, DType) = {
#define QAO_FEW(...) &of<FewTile<__VA_ARGS__>>,
#include "int4_mm/few.inc"
#undef QAO_FEW
};

}  // namespace

FewKernel few_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](half_x, groups, has_zeros, scale_dtype);
}

}  // namespace qao::int4_mm
