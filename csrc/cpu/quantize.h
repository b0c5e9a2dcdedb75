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

// Rows [begin, end) of x as it lies, on the calling thread; a scale of all of x is given. Without q (fp8) only scales.
void quantize_rows(const quantize::Problem& problem, const quantize::Arguments& arguments,
                   const QuantizeKernels& kernels, int64_t begin, int64_t end);

// Rows [begin, end) of a producer's values (kFloat), on the calling thread.
void write_values(const quantize::Problem& problem, const quantize::Arguments& arguments,
                  const QuantizeKernels& kernels, int64_t begin, int64_t end);

}  // namespace qao::cpu
