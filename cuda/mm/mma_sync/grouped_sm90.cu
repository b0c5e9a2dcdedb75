// Portable grouped-GEMM kernels for Hopper.
#define QAO_TILES "mm/mma_sync/grouped_tiles_sm90.inc"
#include "mm/mma_sync/grouped_table.cuh"

namespace qao::mm::mma_sync::grouped {

Kernel kernel_sm90_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::mm::mma_sync::grouped
