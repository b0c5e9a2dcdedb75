// Checks of the rotation of x, shared by operators.
#pragma once

#include <string>

#include "qao/quantize.h"
#include "stable_abi/tensor.h"

namespace qao {

// Columns per block of the Hadamard matrix; `may_be_none`: 0 is allowed.
inline int checked_rotation(const Op& op, int64_t rotation, int64_t k, bool may_be_none = true) {
  if (rotation == 0 && may_be_none) return 0;
  if (!quantize::is_rotation(rotation) || k % rotation != 0) {
    std::string sizes;
    for (int64_t size = 16; quantize::is_rotation(size) && k % size == 0; size *= 2) {
      sizes += (sizes.empty() ? "" : ", ") + std::to_string(size);
    }
    op.fail("a rotation takes blocks of 16, 32, 64, 128 or 256 columns that divide the " + std::to_string(k) +
                " of x: " + std::to_string(rotation) + " does not",
            sizes.empty() ? "No block divides them: leave the rotation out" : "Pass one of " + sizes);
  }
  return static_cast<int>(rotation);
}

}  // namespace qao
