// Attention of few tokens over a key-value cache, on the CPU. Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/attention.h"

namespace qao::cpu {

// y = softmax(scale q kᵀ + mask) v, in float32. The bits do not depend on the number of threads.
Status attention(const attention::Problem& problem, const attention::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
