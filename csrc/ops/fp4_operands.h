// Checks of packed fp4 weights.
#pragma once

#include "layout/fp4.h"
#include "ops/int4_operands.h"
#include "stable_abi/tensor.h"

namespace qao {

inline PackedSizes fp4_sizes_of(const Op& op, const Argument& weight, const Argument& scales) {
  check_packed_ranks(op, weight, scales);
  const int64_t n = weight.size(0) * int4::kTileN, k = weight.size(1) * int4::kTileK;
  return {n, k, fp4::scale_rows(k, fp4::kMxGroup) == scales.size(1) ? fp4::kMxGroup : fp4::kNvGroup};
}

inline void check_fp4(const Op& op, const Argument& weight, const Argument& scales, const Argument& device, int64_t n,
                      int64_t k, int64_t group_size) {
  op.check(group_size == fp4::kMxGroup || group_size == fp4::kNvGroup, "group_size must be 32 (MXFP4) or 16 (NVFP4)",
           "Pack the weight with pack_fp4");
  const int64_t tiles_n = int4::tiles_n(n), rows = fp4::scale_rows(k, group_size);
  op.check(weight.dtype() == int8_code(), "weight must be packed fp4 in an int8 tensor", "Make it with pack_fp4");
  op.check(weight.has_shape({tiles_n, int4::tiles_k(k), int4::kTileBytes}),
           "weight must have shape [ceil(N / 16), ceil(K / 64), 512]",
           "Make it with pack_fp4, and pass the N (out_features) and K (in_features) of the weight that was packed");
  op.check(op.float_dtype(scales) == DType::kBFloat16, "scales must be bfloat16",
           "Pass the scales that pack_fp4 returned");
  op.check(
      scales.has_shape({tiles_n, rows, 1, int4::kTileN}),
      "scales must have shape [ceil(N / 16), ceil(K / 32), 1, 16] with groups of 32, [ceil(N / 16), ceil(K / 16) + "
      "3, 1, 16] with groups of 16",
      "Pass the scales that pack_fp4 returned, and the group_size it was given");
  op.check_packed_operand(weight, device);
  op.check_packed_operand(scales, device);
}

}  // namespace qao
