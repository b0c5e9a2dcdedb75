// y = x · Wᵀ + bias on the CPU, for every format of x and W.
// Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include <span>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "qao/mm.h"

namespace qao::cpu {

// The kernel that mm() runs for this problem with these features: "avx512 gemv vpdpbusd".
const char* mm_kernel(const mm::Problem& problem, Features features);
// With problem.quantizes_x, x is float, unless one static scale covers all of x.
Status mm(const mm::Problem& problem, const mm::Arguments& arguments, const Threads& threads);

struct Gemm {
  mm::Problem problem;
  mm::Arguments arguments;
};
// GEMMs of one x. Those of one weight format and few rows pack x once and divide the N-tiles of all weights.
Status mm(std::span<const Gemm> gemms, const Threads& threads);

}  // namespace qao::cpu
