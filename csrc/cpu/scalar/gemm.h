// Scalar GEMM of float or quantized x and any quantized W, for any CPU and problem.
// Also adds the contribution of Inf and NaN in x to results computed without them.
#pragma once

#include "qao/gemm.h"

namespace qao::cpu::scalar {

// Computes y[:, begin .. end).
void gemm(const gemm::Problem& problem, const gemm::Arguments& arguments, int64_t begin, int64_t end);

// Computes one row, y[m, begin .. end).
void gemm_row(const gemm::Problem& problem, const gemm::Arguments& arguments, int64_t m, int64_t begin, int64_t end);

// Adds x[m, k] * W[n, k] to y[m, n] for those k where x is Inf or NaN, n in [begin, end).
void gemm_add_nonfinite(const gemm::Problem& problem, const gemm::Arguments& arguments, int64_t m, int64_t begin,
                        int64_t end);

}  // namespace qao::cpu::scalar
