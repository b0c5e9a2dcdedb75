// Float weights [N, K] to integers, with a search for the best clipping range, and to fp8 (e4m3), on the CPU; no torch
// headers.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/quantize_groups.h"

namespace qao::cpu {

using WeightProblem = groups::Problem;
using WeightArguments = groups::Arguments;

Status quantize_weight(const WeightProblem& problem, const WeightArguments& arguments, const Threads& threads);

struct BlockProblem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kFloat32;
  int64_t rows = 0, columns = 0;  // that share a scale; the last block may be smaller

  int64_t block_rows() const { return (n + rows - 1) / rows; }
  int64_t block_columns() const { return (k + columns - 1) / columns; }
};

// To fp8: scales, float32 [block_rows, block_columns], map the largest magnitude of a block to 448. No zeros.
Status quantize_weight_fp8(const BlockProblem& problem, const WeightArguments& arguments, const Threads& threads);

}  // namespace qao::cpu
