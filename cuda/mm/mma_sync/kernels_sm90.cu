// Portable kernels for Hopper, with more tile shapes.
#define QAO_TILES "mm/mma_sync/tiles_sm90.inc"
#include "mm/mma_sync/kernel_table.cuh"

namespace qao::mm::mma_sync {

Kernel kernel_sm90_of(int row, Operands operands) { return (*kOfOperands[static_cast<int>(operands)])[row]; }

}  // namespace qao::mm::mma_sync
