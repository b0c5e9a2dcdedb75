// Kernel parameters of the routing of a grouped GEMM, and an upper bound on its token tiles.
#pragma once

#include <cstdint>

#include "qao/grouped_gemm.h"

namespace qao::gemm {

struct Routing {
  const int32_t* ends;  // [experts], any values: an expert begins at the largest end before it; clamped to 0..limit
  int experts;
  int rows;               // of y
  int limit;              // rows of y that may belong to experts: `rows`, or 0 if x has no rows
  int token_tiles;        // upper bound on token tiles, including those of rows without an expert
  int row_blocks;         // CTAs along N per token tile
  const void* row_index;  // [rows] or null; clamped to the rows of x
  bool wide_index;
  int x_rows;
  int64_t x_stride;       // replaces the stride of the dense kernel, which is 0: row * x_stride is added last
  const void* row_scale;  // [rows] or null
  DType row_scale_dtype;
  int64_t weight_bytes, scales_bytes, bias_bytes, sums_bytes;  // stride between experts
  int table_at;  // offset in shared memory: int32, the row of x of each token of the CTA (sm80_mma)
};

// Bytes of the table at `table_at`.
constexpr int table_bytes(int tile_m) { return tile_m * 4; }
// Upper bound on tiles of `tile_m` rows: each expert may end with a partial tile, and so may the rows without an
// expert.
constexpr int token_tiles(int64_t experts, int64_t rows, int tile_m) {
  const int64_t unfilled = experts + 1 < rows ? experts + 1 : rows;
  return static_cast<int>((rows + (tile_m - 1) * unfilled) / tile_m);
}

// Leaves out `table_at`, which only sm80_mma uses.
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

}  // namespace qao::gemm
