// Portable kernels for GPUs other than Hopper.
#define QAO_TILES "gemm/sm80_mma/tiles.inc"
#include "gemm/sm80_mma/kernel_table.cuh"

namespace qao::gemm::sm80_mma {

Kernel kernel_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::gemm::sm80_mma
