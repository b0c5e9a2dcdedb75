// Kernel parameters from a problem, its plan and its tensors. Host code only.
#pragma once

#include <algorithm>

#include "common/integers.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/quantized_x.h"

namespace qao::gemm::sm80_mma {

// Sets the groups of a 4-bit weight, counted in K-tiles.
inline void set_groups(const Problem& problem, const Arguments& arguments, const X& x, Params* p) {
  p->group_scales = static_cast<const uint8_t*>(arguments.scales);
  p->x_sums = x.sums;
  p->groups = static_cast<int>(scale_rows(problem));
  p->group_bytes = group_bytes(problem);
  p->scale_dtype = problem.scale_dtype;
  p->has_zeros = problem.has_zeros;
  p->tile_groups = tile_groups_of(problem);
  p->scale_chunk_shift = log2_of(p->tile_groups * p->group_bytes / 16);
  p->group_shift = p->groups == 1 ? 30 : log2_of(problem.group_size / tile_columns(problem));
}

inline Epilogue epilogue_of(const Problem& problem, const Arguments& arguments) {
  Epilogue e{};
  e.y = arguments.y;
  e.whole_sums = has_whole_sums(problem);
  const bool blocks = has_blocks(problem);
  if (problem.x != Format::kFloat && !blocks) {
    e.x_scales = arguments.x_scales;
    e.x_scale_stride = problem.x_scaling == Scaling::kRow ? 1 : 0;
  }
  if (!is_packed(problem.weight) && !blocks) {
    e.scales = static_cast<const float*>(arguments.scales);
    e.scale_stride = problem.weight_scaling == Scaling::kRow ? 1 : 0;
  }
  if (problem.x_zeros) e.x_zeros = arguments.x_zeros, e.weight_sums = arguments.weight_sums;
  e.bias = problem.has_bias ? arguments.bias : nullptr;
  e.m = problem.m;
  e.n = static_cast<int>(problem.n);
  e.bias_dtype = problem.bias_dtype;
  e.y_dtype = problem.y_dtype;
  return e;
}

inline Params params_of(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x) {
  const int x_bytes = is_split(problem)                                 ? 2
                      : problem.x == Format::kFloat || plan.quantizes_x ? size_of(problem.x_dtype)
                                                                        : 1;
  Params p{};
  p.x = static_cast<const uint8_t*>(x.data);
  p.x_stride = x.stride * x_bytes;
  p.weight = static_cast<const uint8_t*>(arguments.weight);
  p.m = problem.m;
  p.n = static_cast<int>(problem.n);
  p.k = static_cast<int>(problem.k);
  const bool tile_order = problem.weight == Format::kInt4 && problem.x != Format::kFloat;
  p.x_columns = tile_order ? static_cast<int>(int4::tiles_k(problem.k) * int4::kTileK) : p.k;
  p.row_tiles = static_cast<int>(int4::tiles_n(problem.n));
  p.k_tiles = static_cast<int>(ceil_div(problem.k, tile_columns(problem)));
  p.parts = x.parts;
  p.part_stride = x.part_stride * x_bytes;
  p.x_aligned = x.aligned;
  p.weight_aligned = problem.weight_aligned;
  p.split_k = plan.split_k;
  if (plan.runs) {
    const int ctas = static_cast<int>(plan.ctas / plan.split_k);
    p.run = p.row_tiles / ctas, p.more_runs = p.row_tiles % ctas;
  }
  p.sums_at = plan.sums_at, p.sum_places = plan.sum_places;
  p.next_early = plan.next_early;
  if (plan.prefetch_bytes > 0) {
    const int64_t row_bytes = problem.weight == Format::kInt4 ? int64_t{kTileN} * p.x_columns / 2 : problem.k;
    p.prefetch_bytes = static_cast<int>(std::min<int64_t>(row_bytes, plan.prefetch_bytes));
    p.prefetch_rows = plan.prefetch_bytes / p.prefetch_bytes;
  }
  if (is_packed(problem.weight)) {
    set_groups(problem, arguments, x, &p);
  } else if (problem.weight_scaling == Scaling::kBlock) {
    p.block_scales = static_cast<const float*>(arguments.scales);
    p.x_block_scales = problem.x == Format::kFp8 ? arguments.x_scales : nullptr;
  }
  if (plan.quantizes_x) {
    p.resident = resident_of(problem);
    p.resident_at = static_cast<int>(plan.shared_bytes) - p.resident.bytes();
    p.float_row_bytes = float_row_bytes(problem);
    p.x_dtype = problem.x_dtype;
    p.x_scaling = problem.x_scaling;
    p.given_scale = problem.static_scale ? arguments.x_scales : nullptr;
  }
  p.epilogue = epilogue_of(problem, arguments);
  return p;
}

}  // namespace qao::gemm::sm80_mma
