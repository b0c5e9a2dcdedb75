// The checks every int4 op makes of its packed operands.
#pragma once

#include "int4_mm/layout.h"
#include "qao/int4_mm.h"
#include "tensor.h"

namespace qao {

// group_size as kernels know it: -1 becomes K; anything but 32, 64, 128, 256 and K is an error.
inline int64_t checked_group_size(const Op& op, int64_t group_size, int64_t k) {
  if (group_size == -1 || group_size == k) return k;
  op.check(group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256,
           "group_size must be 32, 64, 128, 256, or -1 for one group per row",
           "Repack the weight with such a group_size");
  return group_size;
}

// Shapes, dtypes, device and alignment of a packed weight and its scales; fills has_zeros and scale_dtype of `problem`,
// whose n, k and group_size are set.
inline void check_packed(const Op& op, const Argument& weight, const Argument& scales, const Argument& device,
                         int4_mm::Problem& problem) {
  const int64_t tiles_n = int4_mm::tiles_n(problem.n), tiles_k = int4_mm::tiles_k(problem.k);
  op.check(weight.dtype() == int8_code(), "weight must be packed int4 in an int8 tensor", "Make it with pack_int4");
  op.check(weight.has_shape({tiles_n, tiles_k, int4_mm::kTileBytes}),
           "weight must have shape [ceil(N / 16), ceil(K / 64), 512]",
           "Make it with pack_int4, and pass the N (out_features) and K (in_features) of the weight that was packed");
  problem.scale_dtype = op.float_dtype(scales);
  const int64_t parameters = scales.dim() == 4 ? scales.size(2) : 0;
  op.check((parameters == 1 || parameters == 2) &&
               scales.has_shape({tiles_n, problem.groups(), parameters, int4_mm::kTileN}),
           "scales must have shape [ceil(N / 16), ceil(K / group_size), 1 (symmetric) or 2 (with zero points), 16]",
           "Pass the scales that pack_int4 returned, and the group_size it was given");
  problem.has_zeros = parameters == 2;
  op.check_packed_operand(weight, device);
  op.check_packed_operand(scales, device);
}

}  // namespace qao
