#include "int4_mm/batch.cuh"

namespace qao::int4_mm {
namespace {

constexpr BatchKernel kKernels[] = {
#define QAO_BATCH(...) &batch::batch_kernel<BatchTile<__VA_ARGS__>>,
#include "int4_mm/batch.inc"
#undef QAO_BATCH
};

}  // namespace

BatchKernel batch_kernel(int config) { return kKernels[config]; }

}  // namespace qao::int4_mm
