// The scalar product of float or quantised x and any quantised W: any CPU, any problem; also what Inf and NaN in x add
// to a result computed without them.
#pragma once

#include "qao/mm8.h"

namespace qao::cpu::scalar {

// y[:, begin .. end)
void mm(const mm8::Problem& problem, const mm8::Arguments& arguments, int64_t begin, int64_t end);

// One row of it: y[m, begin .. end).
void mm_row(const mm8::Problem& problem, const mm8::Arguments& arguments, int64_t m, int64_t begin, int64_t end);

// y[m, n] += x[m, k] * W[n, k] over those k whose x is Inf or NaN, n in [begin, end).
void mm_add_nonfinite(const mm8::Problem& problem, const mm8::Arguments& arguments, int64_t m, int64_t begin,
                      int64_t end);

}  // namespace qao::cpu::scalar
