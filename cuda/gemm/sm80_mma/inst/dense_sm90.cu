// Portable kernels for Hopper, with more tile shapes.
#define QAO_TILES "gemm/sm80_mma/tiles_sm90.inc"
#include "gemm/sm80_mma/kernel_table.cuh"

namespace qao::gemm::sm80_mma {

Kernel kernel_sm90_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::gemm::sm80_mma
