// A grouped product: the products of qao/mm.h with a weight an expert, where every row of y is of one expert.
//
//   y[s] = row_scale[s] * (x[row_index[s]] · W[e]ᵀ + bias[e])   for ends[e - 1] <= s < ends[e], ends[-1] = 0
//   y[s] = 0                                                     for the rows after the last expert's
//
// The Problem is that of all rows: m rows of x. The Arguments name expert 0 of weight, scales, bias and weight_sums.
#pragma once

#include "qao/mm.h"

namespace qao::mm {

struct Experts {
  int64_t count = 0;
  int64_t rows = 0;                 // of y
  const int32_t* ends = nullptr;    // [count] the row of y after an expert's last one; wherever x is
  const void* row_index = nullptr;  // [rows] of int64 or int32, or null: row s of x for row s of y
  bool wide_index = true;           // int64
  const void* row_scale = nullptr;  // [rows] of row_scale_dtype, or null: 1
  DType row_scale_dtype = DType::kFloat32;
  int64_t weight_bytes = 0, scales_bytes = 0, bias_bytes = 0, sums_bytes = 0;  // from one expert to the next

  int64_t index(int64_t row) const {
    if (row_index == nullptr) return row;
    return wide_index ? static_cast<const int64_t*>(row_index)[row] : static_cast<const int32_t*>(row_index)[row];
  }
};

// On a GPU `ends` and `row_index` may hold any numbers: an expert begins where the one before it ends, and ends in
// 0..rows; numbers that are no row of x count as the nearest that is.

// As for dense products (qao/mm.h): pure, and asynchronous. Of `experts` the sizes count for a plan, and whether
// there is a row_index.
Status plan(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
              void* stream);

}  // namespace qao::mm
