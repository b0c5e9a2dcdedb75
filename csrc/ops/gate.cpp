// Checks of gate parameters.
#include "ops/gate.h"

#include <cmath>

namespace qao {

quantize::Gate checked_gate(const Op& op, double alpha, double limit, double shift, bool interleaved) {
  const quantize::Gate gate{static_cast<float>(alpha), static_cast<float>(limit), static_cast<float>(shift),
                            interleaved};
  op.check(gate.alpha > 0 && std::isfinite(gate.alpha) && 1 / gate.alpha > 0 && std::isfinite(1 / gate.alpha),
           "alpha must be a positive number", "Pass 1 for SiLU");
  op.check(gate.limit > 0 && std::isfinite(gate.shift), "limit must be positive and shift a number",
           "Pass infinity and 0 for a gate without them");
  return gate;
}

std::optional<quantize::Gate> checked_gate(const Op& op, const GateNumbers& numbers) {
  if (!numbers) return std::nullopt;
  op.check(numbers->size() == 4, "gate must be four numbers: alpha, limit, shift, interleaved",
           "Pass 1, infinity, 0, 0 for SiLU of the first half times the second");
  const double interleaved = (*numbers)[3];
  op.check(interleaved == 0 || interleaved == 1, "the last number of gate, interleaved, must be 0 or 1",
           "Pass 1 for interleaved columns of gate and up, 0 for halves");
  return checked_gate(op, (*numbers)[0], (*numbers)[1], (*numbers)[2], interleaved == 1);
}

}  // namespace qao
