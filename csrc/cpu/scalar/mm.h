// Scalar GEMM of float or quantized x and any quantized W, for any CPU and problem.
// Also adds the contribution of Inf and NaN in x to results computed without them.
#pragma once

#include "qao/mm.h"

namespace qao::cpu::scalar {

// Computes y[:, begin .. end).
void mm(const mm::Problem& problem, const mm::Arguments& arguments, int64_t begin, int64_t end);

// Computes one row, y[m, begin .. end).
void mm_row(const mm::Problem& problem, const mm::Arguments& arguments, int64_t m, int64_t begin, int64_t end);

// Adds x[m, k] * W[n, k] to y[m, n] for those k where x is Inf or NaN, n in [begin, end).
void mm_add_nonfinite(const mm::Problem& problem, const mm::Arguments& arguments, int64_t m, int64_t begin,
                      int64_t end);

}  // namespace qao::cpu::scalar
