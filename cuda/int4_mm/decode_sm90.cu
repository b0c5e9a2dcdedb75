#include "int4_mm/decode.cuh"

namespace qao::int4_mm {
namespace {

constexpr DecodeKernel kKernels[] = {
#define QAO_DECODE(stages, ...) &decode::decode_kernel<DecodeTile<__VA_ARGS__>>,
#include "int4_mm/decode.inc"
#undef QAO_DECODE
};

}  // namespace

DecodeKernel decode_kernel(int config) { return kKernels[config]; }

}  // namespace qao::int4_mm
