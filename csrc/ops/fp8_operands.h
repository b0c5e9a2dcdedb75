// Checks of fp8 activation scales, shared by fp8_quantize and fp8_fp8_mm.
#pragma once

#include "qao/types.h"
#include "stable_abi/tensor.h"

namespace qao {

// -1: one scale per row; 128: one per block of 128 columns; 0: one for the whole tensor.
inline Scaling x_scaling_of(const Op& op, int64_t group_size) {
  op.check(
      group_size == -1 || group_size == 0 || group_size == kScaleBlock,
      "the group size of x must be -1 (one scale per row), 128 (per 1 x 128 block) or 0 (one for the whole tensor)",
      "Pass one of these");
  return group_size == -1 ? Scaling::kRow : group_size == 0 ? Scaling::kTensor : Scaling::kBlock;
}

// Checks a static scale.
inline void check_static_scale(const Op& op, const Argument& scale, const Argument& x, Scaling scaling) {
  op.check(scaling == Scaling::kTensor, "a given scale is for the whole tensor", "Pass group size 0 with it");
  op.check(scale.dtype() == float32_code() && scale.numel() == 1, "the scale of x must be one float32",
           "Pass scale.float().reshape(1)");
  op.check(scale.same_device(x), "the scale and x are on different devices",
           "Move them to one device with .to(device)");
}

}  // namespace qao
