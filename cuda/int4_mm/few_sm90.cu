#include "int4_mm/few.cuh"

namespace qao::int4_mm {
namespace {

constexpr FewKernel kKernels[] = {
#define QAO_FEW(...) &few::few_kernel<FewTile<__VA_ARGS__>>,
#include "int4_mm/few.inc"
#undef QAO_FEW
};

}  // namespace

FewKernel few_kernel(int config) { return kKernels[config]; }

}  // namespace qao::int4_mm
