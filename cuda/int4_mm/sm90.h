// Many tokens on Hopper: the body is that of mm8, for which int4 beside a float x is one more pair of formats.
#pragma once

#include "qao/int4_mm.h"
#include "qao/mm8.h"

namespace qao::int4_mm {

inline mm8::Problem sm90_problem(const Problem& problem) {
  mm8::Problem p;
  p.m = problem.m, p.n = problem.n, p.k = problem.k;
  p.x = Format::kFloat, p.weight = Format::kInt4;
  p.x_dtype = p.y_dtype = problem.x_dtype;
  p.group_size = problem.group_size;
  p.has_zeros = problem.has_zeros;
  p.scale_dtype = problem.scale_dtype;
  p.has_bias = problem.has_bias;
  p.bias_dtype = problem.bias_dtype;
  p.x_aligned = problem.x_aligned;
  return p;
}

// The fields that both kinds of plan have.
template <typename To, typename From>
To plan_as(const From& from) {
  To to;
  to.kernel = from.kernel, to.reason = from.reason, to.instruction = from.instruction;
  to.config = from.config;
  to.tile_n = from.tile_n, to.tile_m = from.tile_m;
  to.warps = from.warps, to.stages = from.stages, to.split_k = from.split_k, to.ctas = from.ctas,
  to.splits_last = from.splits_last;
  to.shared_bytes = from.shared_bytes, to.workspace_bytes = from.workspace_bytes;
  return to;
}

}  // namespace qao::int4_mm
