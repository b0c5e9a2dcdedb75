// Grouped products on the CPU. Same Problem, Arguments and Experts as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/grouped_mm.h"
#include "qao/quantize.h"

namespace qao::cpu {

// Row for row the bits of cpu::mm over the rows of each expert, but for row_scale. `experts` is checked: its ends do
// not decrease and its indices are rows of x. With a gate y [rows, n / 2] is what the gate makes of those rows, times
// row_scale.
Status grouped_mm(const mm::Problem& problem, const mm::Arguments& arguments, const mm::Experts& experts,
                  const quantize::Gate* gate, const Threads& threads);

}  // namespace qao::cpu
