// The scalar product of float or quantised x and any quantised W: any CPU, any problem; also what Inf and NaN in x add
// to a result computed without them.
#pragma once

#include "qao/mm.h"

namespace qao::cpu::scalar {

// y[:, begin .. end)
void mm(const mm::Problem& problem, const mm::Arguments& arguments, int64_t begin, int64_t end);

// One row of it: y[m, begin .. end).
void mm_row(const mm::Problem& problem, const mm::Arguments& arguments, int64_t m, int64_t begin, int64_t end);

// y[m, n] += x[m, k] * W[n, k] over those k whose x is Inf or NaN, n in [begin, end).
void mm_add_nonfinite(const mm::Problem& problem, const mm::Arguments& arguments, int64_t m, int64_t begin,
                      int64_t end);

}  // namespace qao::cpu::scalar
