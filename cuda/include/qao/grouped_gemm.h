// Grouped GEMM: the GEMMs of qao/gemm.h with one weight per expert. Each row of y belongs to one expert.
//
//   y[s] = row_scale[s] * (x[row_index[s]] · W[e]ᵀ + bias[e])   for ends[e - 1] <= s < ends[e], ends[-1] = 0
//   y[s] = 0                                                     for the rows after the last expert's
//
// Problem::m counts the rows of x. Arguments point to expert 0 of weight, scales, bias and weight_sums.
#pragma once

#include "qao/gemm.h"

namespace qao::gemm {

struct Experts {
  int64_t count = 0;
  int64_t rows = 0;                 // of y
  const int32_t* ends = nullptr;    // [count] the row of y after the expert's last one; on the device of x
  const void* row_index = nullptr;  // [rows] of int64 or int32, or null: y[s] reads x[s]
  bool wide_index = true;           // int64
  const void* row_scale = nullptr;  // [rows] of row_scale_dtype, or null: 1
  DType row_scale_dtype = DType::kFloat32;
  int64_t weight_bytes = 0, scales_bytes = 0, bias_bytes = 0, sums_bytes = 0;  // stride between experts

  int64_t index(int64_t row) const {
    if (row_index == nullptr) return row;
    return wide_index ? static_cast<const int64_t*>(row_index)[row] : static_cast<const int32_t*>(row_index)[row];
  }
};

// On a GPU `ends` and `row_index` may hold any values: an expert begins where the previous one ends, ends are clamped
// to 0..rows, and row indices are clamped to the rows of x.

// As for dense GEMMs (qao/gemm.h): plan() is pure, launch() is asynchronous. plan() reads only the sizes in `experts`
// and whether there is a row_index.
Status plan(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
              void* stream);

}  // namespace qao::gemm
