// The portable W4A16 kernels for int4 and fp4 weights, as float_int4_launch.cu sees them.
#pragma once

#include "mm/int4_params.h"

namespace qao::mm::mma_sync::float_int4 {

using Params = Int4Params;

// `config` is a row of float_int4_tiles.inc; `zeros` selects the kernel that applies zero points.
using Kernel = void (*)(Params);
Kernel kernel_of(int config, bool half, bool zeros);
Kernel fp4_kernel_of(int config, bool half, bool nvfp4);

}  // namespace qao::mm::mma_sync::float_int4
