// The scalar mm8: any CPU, any problem.
#pragma once

#include "qao/mm8.h"

namespace qao::cpu {

// y[:, begin .. end)
void mm8_scalar(const mm8::Problem& problem, const mm8::Arguments& arguments, int64_t begin, int64_t end);

}  // namespace qao::cpu
