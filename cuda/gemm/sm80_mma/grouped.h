// Signatures of the portable grouped-GEMM kernels.
// They take the parameters of a dense kernel, set for expert 0, and a routing.
#pragma once

#include "gemm/moe_routing.h"
#include "gemm/sm80_mma/params.h"

namespace qao::gemm::sm80_mma::grouped {

// Rows of grouped_tiles_sm90.inc; rows of grouped_tiles.inc follow. A plan's config counts through both.
constexpr int kGroupedTilesSm90 = 0
#define QAO_TILE(...) +1
#include "gemm/sm80_mma/grouped_tiles_sm90.inc"
#undef QAO_TILE
    ;
// `row` counts within one of the two files.
using Kernel = void (*)(Params, Routing);
Kernel kernel_sm90_of(int row, Operands operands);
Kernel kernel_of(int row, Operands operands);

// `row` is one of grouped_weight_only_tiles.inc.
Kernel w4a16_kernel_of(int row, bool half, bool zeros);
Kernel wfp4a16_kernel_of(int row, bool half, bool nvfp4);

}  // namespace qao::gemm::sm80_mma::grouped
