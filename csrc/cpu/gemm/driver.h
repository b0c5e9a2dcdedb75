// y = x · Wᵀ + bias on the CPU, for every format of x and W.
// Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include <span>

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "qao/gemm.h"

namespace qao::cpu {

// The kernel that gemm() runs for this problem with these features: "avx512 gemv vpdpbusd".
const char* gemm_kernel(const gemm::Problem& problem, Features features);
// With problem.quantizes_x, x is float, unless one static scale covers all of x.
Status gemm(const gemm::Problem& problem, const gemm::Arguments& arguments, const Threads& threads);

struct Gemm {
  gemm::Problem problem;
  gemm::Arguments arguments;
};
// GEMMs of one x. Those of one weight format and few rows pack x once and divide the N-tiles of all weights.
Status gemm(std::span<const Gemm> gemms, const Threads& threads);

}  // namespace qao::cpu
