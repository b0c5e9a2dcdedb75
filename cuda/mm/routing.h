// The routing of a grouped product as kernels get it, and how many tiles of rows it may have.
#pragma once

#include <cstdint>

#include "qao/grouped_mm.h"

namespace qao::mm {

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
  int table_at;         // offset in shared memory: int32, the row of x for each token of the CTA (mma_sync)
  const float* x_sums;  // float32 x beside int4 with zero points: [x_rows, groups], else null
};

// Bytes of the table.
constexpr int table_bytes(int tile_m) { return tile_m * 4; }
// Tiles of `tile_m` rows: every expert may leave one unfilled, and so may the rows of none.
constexpr int token_tiles(int64_t experts, int64_t rows, int tile_m) {
  const int64_t unfilled = experts + 1 < rows ? experts + 1 : rows;
  return static_cast<int>((rows + (tile_m - 1) * unfilled) / tile_m);
}

// Without `table_at` and `x_sums`, which not every body has.
inline Routing routing_of(const Problem& problem, const Plan& plan, const Experts& experts) {
  Routing r{};
  r.ends = experts.ends;
  r.experts = static_cast<int>(experts.count);
  r.rows = static_cast<int>(experts.rows);
  r.limit = problem.m == 0 ? 0 : r.rows;
  r.token_tiles = token_tiles(experts.count, experts.rows, plan.tile_m);
  r.row_blocks = static_cast<int>(plan.ctas / r.token_tiles);
  r.row_index = experts.row_index;
  r.wide_index = experts.wide_index;
  r.x_rows = static_cast<int>(problem.m);
  r.row_scale = experts.row_scale;
  r.row_scale_dtype = experts.row_scale_dtype;
  r.weight_bytes = experts.weight_bytes, r.scales_bytes = experts.scales_bytes;
  r.bias_bytes = experts.bias_bytes, r.sums_bytes = experts.sums_bytes;
  return r;
}

}  // namespace qao::mm
