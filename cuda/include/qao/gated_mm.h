// A grouped product and the gate behind it in one kernel: y [rows, n / 2] is what quantize::Gate makes of the rows that
// qao/grouped_mm.h says, without row_scale and rounded to the dtype of y, and row_scale then multiplies them.
#pragma once

#include "qao/grouped_mm.h"
#include "qao/quantize.h"

namespace qao::mm {

// False where the gate is to be a kernel of its own.
bool plan_gated(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);
Status launch_gated(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
                    const quantize::Gate& gate, void* stream);

}  // namespace qao::mm
