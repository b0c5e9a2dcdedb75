// Activations to eight bits, and the values of producers, on the CPU. Same Problem and Arguments as CUDA, Order::kRows
// alone; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/quantize.h"

namespace qao::cpu {

Status quantize(const quantize::Problem& problem, const quantize::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
