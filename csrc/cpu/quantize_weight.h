// Quantization of float weights [N, K] on the CPU, no torch headers.
// Formats are integers with a search for the best clipping range, fp8 (e4m3), and fp4 (e2m1) with the better of two
// scales.
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
  int64_t rows = 0, columns = 0;  // of a block with one scale; the last block may be smaller

  int64_t block_rows() const { return (n + rows - 1) / rows; }
  int64_t block_columns() const { return (k + columns - 1) / columns; }
};

// To fp8: scales, float32 [block_rows, block_columns], map the largest magnitude of a block to 448. No zero points.
Status quantize_weight_fp8(const BlockProblem& problem, const WeightArguments& arguments, const Threads& threads);

struct Fp4Problem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kFloat32;
  bool is_nvfp4 = false;  // groups of 16, e4m3 scales, one divisor; else groups of 32, power-of-two scales

  int64_t group_size() const { return is_nvfp4 ? 16 : 32; }
  int64_t groups() const { return (k + group_size() - 1) / group_size(); }
};

// scales: bfloat16 [n, groups]. zeros: the divisor, float32 [1], which maps the largest scale to 448; 1 for MXFP4.
Status quantize_weight_fp4(const Fp4Problem& problem, const WeightArguments& arguments, const Threads& threads);

// The largest magnitude of a weight [n, k], from `arguments` only; NaN if any value is not finite.
Status largest_magnitude(const BlockProblem& problem, const WeightArguments& arguments, const Threads& threads,
                         float* largest);

}  // namespace qao::cpu
