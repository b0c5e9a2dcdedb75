// Signatures of the portable W4A16 kernels for int4 and fp4 weights.
#pragma once

#include "gemm/weight_only_params.h"

namespace qao::gemm::sm80_mma::weight_only {

using Params = Int4Params;

// `config` is a row of weight_only_tiles.inc; `zeros` selects the kernel that applies zero points.
using Kernel = void (*)(Params);
Kernel kernel_of(int config, bool half, bool zeros);
Kernel fp4_kernel_of(int config, bool half, bool nvfp4);

}  // namespace qao::gemm::sm80_mma::weight_only
