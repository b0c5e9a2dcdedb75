// GPTQ's loop over the columns of a block on the CPU. Same interface as CUDA; no torch headers.
#pragma once

#include "cpu/parallel.h"
#include "qao/gptq.h"

namespace qao::cpu {

void gptq_round_columns(const gptq::Problem& problem, const gptq::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
