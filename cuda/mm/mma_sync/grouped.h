// The portable grouped-GEMM kernels as grouped_launch.cu sees them.
// They take the parameters of a dense kernel, set for expert 0, and a routing.
#pragma once

#include "mm/int4_params.h"
#include "mm/mma_sync/kernels.h"
#include "mm/routing.h"

namespace qao::mm::mma_sync::grouped {

// Rows of grouped_tiles_sm90.inc; rows of grouped_tiles.inc follow. A plan's config counts through both.
constexpr int kGroupedTilesSm90 = 0
#define QAO_TILE(...) +1
#include "mm/mma_sync/grouped_tiles_sm90.inc"
#undef QAO_TILE
    ;
// `row` counts within one of the two files.
using Kernel = void (*)(Params, Routing);
Kernel kernel_sm90_of(int row, Operands operands);
Kernel kernel_of(int row, Operands operands);

// `config` is a row of grouped_float_int4_tiles.inc.
using FloatInt4Kernel = void (*)(Int4Params, Routing);
FloatInt4Kernel float_int4_kernel_of(int config, bool half, bool zeros);
FloatInt4Kernel float_fp4_kernel_of(int config, bool half, bool nvfp4);

// Launches a plan of mm::plan() for a grouped GEMM.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);

}  // namespace qao::mm::mma_sync::grouped
