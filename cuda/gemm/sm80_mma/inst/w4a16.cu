// Instantiations for a float x with int4 W.
#define QAO_KERNEL sm80_mma_w4a16
#include "gemm/sm80_mma/weight_only_int4.cuh"
#include "gemm/sm80_mma/weight_only_kernel_table.cuh"

namespace qao::gemm::sm80_mma {

Kernel w4a16_kernel_of(int row, bool half, bool zeros) {
  return zeros ? kernel_of<FloatInt4<true>>(row, half) : kernel_of<FloatInt4<false>>(row, half);
}

}  // namespace qao::gemm::sm80_mma
