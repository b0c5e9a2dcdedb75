// CPU kernels for every product with an operand of eight bits. Same Problem and Arguments as CUDA; no torch headers.
#pragma once

#include "cpu/isa.h"
#include "cpu/parallel.h"
#include "qao/mm8.h"

namespace qao::cpu {

// The kernel `mm8` runs for this problem at this ISA level.
KernelName mm8_kernel(const mm8::Problem& problem, Isa isa);
Status mm8(const mm8::Problem& problem, const mm8::Arguments& arguments, const Threads& threads);

}  // namespace qao::cpu
