// Which kernel runs a problem, and how. Pure host code: a function of the problem and the GPU's numbers, nothing else.
#include "qao/mm8.h"

namespace qao::mm8 {

Status plan(const Problem&, const Gpu&, Plan*) { return Status::error("mm8 has no CUDA kernels yet"); }

std::string to_string(const Plan& plan) { return plan.kernel; }

}  // namespace qao::mm8
