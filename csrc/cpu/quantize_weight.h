// Float weights [N, K] to integers, with a search for the best clipping range, and to fp8 (e4m3), on the CPU; no torch
// headers.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::cpu {

struct WeightProblem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kFloat32;
  Format format = Format::kInt4;  // 0..15 in a uint8; kInt8: -127..127
  int64_t group_size = 0;         // columns that share a scale: a multiple of 16, or k
  bool symmetric = true;          // zero points are 8 (int4) or 0 (int8)
  DType scale_dtype = DType::kFloat32;
  const float* factors = nullptr;  // multiples of a group's range that are tried, the first of the best is taken
  int64_t factor_count = 0;
  bool whole_zeros = false;  // no zero points but whole numbers
  int64_t rounds = 0;        // of least squares for the scale and a zero point that is none

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct WeightArguments {
  const void* weight = nullptr;       // [n, k] of weight_dtype, unit stride along k
  int64_t weight_stride = 0;          // elements
  const float* importance = nullptr;  // [k], of the squared error of each column; null: all alike
  uint8_t* q = nullptr;               // [n, k]
  void* scales = nullptr;             // [n, groups] of scale_dtype
  void* zeros = nullptr;              // [n, groups] of scale_dtype
  double* squares = nullptr;  // [2]: sums of squares of the error and of the weight; not finite if a value is not
};

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
