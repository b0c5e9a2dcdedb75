// MoE routing on the CPU: top-k, permute and unpermute. Same structs as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/moe.h"

namespace qao::cpu {

void sort(const experts::Sort& sort);
void choose(const experts::TopK& top_k, const Threads& threads);

// Returns an error for a slot index that is not a row, before writing anything.
Status sum(const experts::Sum& sum, const Threads& threads);

}  // namespace qao::cpu
