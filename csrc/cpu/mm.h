// y = x · Wᵀ + bias on the CPU, for every format of x and W. Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "qao/int4_mm.h"
#include "qao/mm8.h"

namespace qao::cpu {

// Float x with int4 W is a problem of its own on CUDA, and one of mm8's here.
mm8::Problem as_mm8(const int4_mm::Problem& problem);

// The kernel that mm() runs for this problem with these features: "avx512 gemv vpdpbusd".
const char* mm_kernel(const mm8::Problem& problem, Features features);
Status mm(const mm8::Problem& problem, const mm8::Arguments& arguments, const Threads& threads);
Status mm(const int4_mm::Problem& problem, const int4_mm::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
