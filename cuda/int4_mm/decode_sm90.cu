#include "int4_mm/decode.cuh"
#include "int4_mm/variants.h"

namespace qao::int4_mm {
namespace {

template <typename Tile>
DecodeKernel of(int groups, bool has_zeros, DType scale_dtype) {
  return variant(groups, has_zeros, scale_dtype, [&]<int count, bool zeros, DType dtype>() -> DecodeKernel {
    return &decode::decode_kernel<Tile, count, zeros, dtype>;
  });
}

constexpr DecodeKernel (*kKernels[])(int, bool, DType) = {
#define QAO_DECODE(stages, ...) &of<DecodeTile<__VA_ARGS__>>,
#include "int4_mm/decode.inc"
#undef QAO_DECODE
};

}  // namespace

DecodeKernel decode_kernel(int config, int groups, bool has_zeros, DType scale_dtype) {
  return kKernels[config](groups, has_zeros, scale_dtype);
}

}  // namespace qao::int4_mm
