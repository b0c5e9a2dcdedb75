// The way of tokens to experts and back on the CPU. Same structs as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/experts.h"

namespace qao::cpu {

void sort(const experts::Sort& sort);
void choose(const experts::TopK& top_k, const Threads& threads);

// A place that is no row is an error, before anything is written.
Status sum(const experts::Sum& sum, const Threads& threads);

}  // namespace qao::cpu
