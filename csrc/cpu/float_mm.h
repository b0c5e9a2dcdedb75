// CPU kernels for every product whose x is in float, or in fp8 and widened to bfloat16: int4_mm, int8_mm, fp8_mm,
// fp8_fp8_mm and fp8_int4_mm. No torch headers.
#pragma once

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "qao/mm8.h"

namespace qao::cpu {

// The kernel `float_mm` runs for this problem at this ISA level, for reports.
KernelName float_mm_kernel(const mm8::Problem& problem, Isa isa);
// problem.x is not int8; float x with int4 W, which is not one of mm8's own, is welcome too.
Status float_mm(const mm8::Problem& problem, const mm8::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
