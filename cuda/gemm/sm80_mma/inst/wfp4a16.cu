// Instantiations for a float x with fp4 W.
#define QAO_KERNEL sm80_mma_wfp4a16
#include "gemm/sm80_mma/weight_only_fp4.cuh"
#include "gemm/sm80_mma/weight_only_kernel_table.cuh"

namespace qao::gemm::sm80_mma {

Kernel wfp4a16_kernel_of(int row, bool half, bool nvfp4) {
  return nvfp4 ? kernel_of<FloatFp4<4>>(row, half) : kernel_of<FloatFp4<2>>(row, half);
}

}  // namespace qao::gemm::sm80_mma
