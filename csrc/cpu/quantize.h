// Quantization of activations to eight bits, and the producers' outputs, on the CPU.
// Same Problem and Arguments as CUDA, with Order::kRows only; no torch headers.
#pragma once

#include "cpu/features.h"
#include "cpu/parallel.h"
#include "qao/quantize.h"

namespace qao::cpu {

// The loops for the highest available instruction set. quantize_weight.cpp uses them too.
struct QuantizeKernels;
const QuantizeKernels& quantize_kernels(Features features);

Status quantize(const quantize::Problem& problem, const quantize::Arguments& arguments, const Threads& threads);

// Quantizes rows [begin, end) of a plain x on the calling thread. A per-tensor scale is static. Without q (fp8) only
// computes scales.
void quantize_rows(const quantize::Problem& problem, const quantize::Arguments& arguments,
                   const QuantizeKernels& kernels, int64_t begin, int64_t end);

// Writes rows [begin, end) of a producer's output (kFloat) on the calling thread.
void write_values(const quantize::Problem& problem, const quantize::Arguments& arguments,
                  const QuantizeKernels& kernels, int64_t begin, int64_t end);

}  // namespace qao::cpu
