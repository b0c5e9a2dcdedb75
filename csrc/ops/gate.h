// Checked gate parameters of operators with a fused gate.
#pragma once

#include <optional>
#include <vector>

#include "qao/quantize.h"
#include "stable_abi/tensor.h"

namespace qao {

using GateNumbers = std::optional<std::vector<double>>;  // alpha, limit, shift, interleaved; nullopt: no gate

quantize::Gate checked_gate(const Op& op, double alpha, double limit, double shift, bool interleaved);
std::optional<quantize::Gate> checked_gate(const Op& op, const GateNumbers& numbers);

// Runs a producer into `arguments` on the device of x. In quantize.cpp.
void run(const Op& op, const quantize::Problem& problem, const quantize::Arguments& arguments, const Argument& x);

}  // namespace qao
