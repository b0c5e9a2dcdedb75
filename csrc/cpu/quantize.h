// Activations to eight bits, and the values of producers, on the CPU. Same Problem and Arguments as CUDA, Order::kRows
// alone; no torch headers.
#pragma once

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "qao/quantize.h"

namespace qao::cpu {

// The loops for the most features that are there; quantize_weight.cpp runs them too.
struct QuantizeKernels;
const QuantizeKernels& quantize_kernels(Features features);

Status quantize(const quantize::Problem& problem, const quantize::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
