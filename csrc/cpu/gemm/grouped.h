// Grouped GEMMs on the CPU. Same Problem, Arguments and Experts as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/grouped_gemm.h"
#include "qao/quantize.h"

namespace qao::cpu {

// Each row is bit-identical to cpu::gemm over the rows of its expert, except for row_scale. `experts` must be valid:
// its ends do not decrease, and its indices are rows of x. With a gate, y [rows, n / 2] is the gate's output times
// row_scale.
Status grouped_gemm(const gemm::Problem& problem, const gemm::Arguments& arguments, const gemm::Experts& experts,
                    const quantize::Gate* gate, const Threads& threads);

}  // namespace qao::cpu
