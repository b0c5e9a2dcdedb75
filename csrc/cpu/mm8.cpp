// mm8 on the CPU: which kernel runs, and how it is spread over threads.
#include "cpu/mm8.h"

#include "cpu/mm8_scalar.h"

namespace qao::cpu {

KernelName mm8_kernel(const mm8::Problem&, Isa) { return {"scalar", "float64"}; }

Status mm8(const mm8::Problem& p, const mm8::Arguments& a, const Threads& threads) {
  Isa isa;
  if (Status status = selected_isa(&isa); !status.ok()) return status;
  threads.for_each([&](int i) { mm8_scalar(p, a, p.n * i / threads.count, p.n * (i + 1) / threads.count); });
  return {};
}

}  // namespace qao::cpu
