// Portable grouped-GEMM kernels for Hopper.
#define QAO_TILES "gemm/sm80_mma/grouped_tiles_sm90.inc"
#include "gemm/sm80_mma/grouped_kernel_table.cuh"

namespace qao::gemm::sm80_mma::grouped {

Kernel kernel_sm90_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::gemm::sm80_mma::grouped
