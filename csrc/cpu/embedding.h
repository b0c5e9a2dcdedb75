// Rows of a quantised weight on the CPU. Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/embedding.h"

namespace qao::cpu {

// An id outside 0..n-1 is an error, before anything is written.
Status embedding(const embedding::Problem& problem, const embedding::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
