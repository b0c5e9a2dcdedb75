// Portable kernels for GPUs other than Hopper.
#define QAO_TILES "mm/mma_sync/tiles.inc"
#include "mm/mma_sync/kernel_table.cuh"

namespace qao::mm::mma_sync {

Kernel kernel_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::mm::mma_sync
