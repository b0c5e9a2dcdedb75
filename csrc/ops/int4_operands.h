// Checks of packed int4 operands, shared by all int4 ops.
#pragma once

#include "layout/int4.h"
#include "qao/int4.h"
#include "stable_abi/tensor.h"

namespace qao {

inline void check_packed_sizes(const Op& op, int64_t n, int64_t k) {
  op.check(n >= 1 && k >= 1, "out_features and in_features must be at least 1",
           "Pass the N and K of the weight that was packed");
}

// N, K and group_size of a packed weight.
struct PackedSizes {
  int64_t n, k, group_size;

  // All 0: infer the sizes from the tensors; N and K are then those of whole tiles.
  bool left_out() const { return n == 0 && k == 0 && group_size == 0; }
};

inline void check_packed_ranks(const Op& op, const Argument& weight, const Argument& scales) {
  op.check(weight.dim() == 3 && scales.dim() == 4, "weight must have 3 dimensions and scales 4",
           "Pass the result of packing");
}

// Infers group_size: the first of 128, 64, 32, 256 and K that gives this number of scales. It is unique if there are at
// least two groups.
inline PackedSizes int4_sizes_of(const Op& op, const Argument& weight, const Argument& scales) {
  check_packed_ranks(op, weight, scales);
  const int64_t n = weight.size(0) * int4::kTileN, k = weight.size(1) * int4::kTileK;
  for (int64_t group_size : {128, 64, 32, 256}) {
    if ((k + group_size - 1) / group_size == scales.size(1)) return {n, k, group_size};
  }
  return {n, k, k};
}

// Resolves group_size: -1 becomes K. Anything but 32, 64, 128, 256 and K is an error.
inline int64_t checked_group_size(const Op& op, int64_t group_size, int64_t k) {
  if (group_size == -1 || group_size == k) return k;
  op.check(group_size == 32 || group_size == 64 || group_size == 128 || group_size == 256,
           "group_size must be 32, 64, 128, 256, or -1 for one group per row",
           "Repack the weight with such a group_size");
  return group_size;
}

// Checks shapes, dtypes, device and alignment of a packed weight [n, k] and its scales.
inline int4::Weight checked_packed(const Op& op, const Argument& weight, const Argument& scales, const Argument& device,
                                   int64_t n, int64_t k, int64_t group_size) {
  int4::Weight shape;
  shape.n = n, shape.k = k;
  shape.group_size = checked_group_size(op, group_size, k);
  const int64_t tiles_n = int4::tiles_n(n), tiles_k = int4::tiles_k(k);
  op.check(weight.dtype() == int8_code(), "weight must be packed int4 in an int8 tensor", "Make it with pack_int4");
  op.check(weight.has_shape({tiles_n, tiles_k, int4::kTileBytes}),
           "weight must have shape [ceil(N / 16), ceil(K / 64), 512]",
           "Make it with pack_int4, and pass the N (out_features) and K (in_features) of the weight that was packed");
  shape.scale_dtype = op.float_dtype(scales);
  const int64_t parameters = scales.dim() == 4 ? scales.size(2) : 0;
  op.check(
      (parameters == 1 || parameters == 2) && scales.has_shape({tiles_n, shape.groups(), parameters, int4::kTileN}),
      "scales must have shape [ceil(N / 16), ceil(K / group_size), 1 (symmetric) or 2 (with zero points), 16]",
      "Pass the scales that pack_int4 returned, and the group_size it was given");
  shape.has_zeros = parameters == 2;
  op.check_packed_operand(weight, device);
  op.check_packed_operand(scales, device);
  return shape;
}

}  // namespace qao
