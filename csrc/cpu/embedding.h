// Embedding lookup in a quantized weight on the CPU.
// Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/embedding.h"

namespace qao::cpu {

// Returns an error for an id outside 0..n-1, before writing anything.
Status embedding(const embedding::Problem& problem, const embedding::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
