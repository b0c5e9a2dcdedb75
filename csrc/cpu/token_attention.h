// Attention of one token per sequence over a static cache, on the CPU. Same structs as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/token_attention.h"

namespace qao::cpu {

// `rotated_q`: memory of [batch, heads, size] elements of the dtype. Any even size and number of heads.
Status token_attention(const attention::TokenProblem& problem, const attention::TokenArguments& arguments,
                       void* rotated_q, const Threads& threads);

void key_ranges(const attention::KeyMask& mask, int64_t batch, int64_t keys, attention::KeyRange* ranges);

}  // namespace qao::cpu
