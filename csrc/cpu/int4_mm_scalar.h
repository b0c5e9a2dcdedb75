// The scalar int4_mm: any CPU, any problem; also what Inf and NaN in x add to a result computed without them.
#pragma once

#include <cstdint>

#include "qao/int4_mm.h"

namespace qao::cpu {

// y[:, begin .. end)
void int4_mm_scalar(const int4_mm::Problem& problem, const int4_mm::Arguments& arguments, int64_t begin, int64_t end);

// One row of it: y[m, begin .. end).
void int4_mm_scalar_row(const int4_mm::Problem& problem, const int4_mm::Arguments& arguments, int64_t m, int64_t begin,
                        int64_t end);

// y[m, n] += x[m, k] * W[n, k] over those k whose x is Inf or NaN, n in [begin, end).
void int4_add_nonfinite(const int4_mm::Problem& problem, const int4_mm::Arguments& arguments, int64_t m, int64_t begin,
                        int64_t end);

}  // namespace qao::cpu
