// Grouped products as grouped_launch.cu sees their kernels: the parameters of a dense kernel, which name expert 0, and
// a routing.
#pragma once

#include <cstdint>

#include "mm/int4_params.h"
#include "mm/mma_sync/kernels.h"
#include "qao/grouped_mm.h"

namespace qao::mm::mma_sync::grouped {

struct Routing {
  const int32_t* ends;  // [experts], any numbers: an expert begins where those before it end, and ends in 0..limit
  int experts;
  int rows;               // of y
  int limit;              // rows of y that experts may have: all, or none if x has no rows
  int token_tiles;        // at most so many tiles of rows, those of nobody's rows included
  int row_blocks;         // CTAs that share the rows of W for one of them
  const void* row_index;  // [rows] or null; numbers that are no row of x count as the nearest that is
  bool wide_index;
  int x_rows;
  int64_t x_stride;       // as of the dense kernel, whose own is 0: a row is added to it last
  const void* row_scale;  // [rows] or null
  DType row_scale_dtype;
  int64_t weight_bytes, scales_bytes, bias_bytes, sums_bytes;  // from one expert to the next
  int table_at;         // offset in shared memory: int32, the row of x for each token of the CTA
  const float* x_sums;  // float32 x beside int4 with zero points: [x_rows, groups], else null
};

// Bytes of the table.
constexpr int table_bytes(int tile_m) { return tile_m * 4; }
// Tiles of `tile_m` rows: every expert may leave one unfilled, and so may the rows of none.
constexpr int token_tiles(int64_t experts, int64_t rows, int tile_m) {
  const int64_t unfilled = experts + 1 < rows ? experts + 1 : rows;
  return static_cast<int>((rows + (tile_m - 1) * unfilled) / tile_m);
}

// Of rows of grouped_tiles.inc and grouped_float_int4_tiles.inc.
using Kernel = void (*)(Params, Routing);
using FloatInt4Kernel = void (*)(Int4Params, Routing);
Kernel kernel_of(int config, Operands operands);
FloatInt4Kernel float_int4_kernel_of(int config, bool half, bool zeros);

// Carries out a plan of mm::plan() for experts.
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);

}  // namespace qao::mm::mma_sync::grouped
