// Weights in four-bit floats. Codes are e2m1: a sign, two bits of exponent, one of mantissa. They lie where the nibbles
// of int4 do (int4/layout.h), and rows and columns past N and K hold 8, which is -0.
//
// scales   bfloat16   [N/16][groups + row parts][1][16]
//
//   MXFP4    groups of 32, scales are powers of two (e8m0); no row parts:   W = code * scale
//   NVFP4    groups of 16, scales are e4m3; then three row parts, whose sum
//            is a float32 number that divides the scales of the row:        W = code * (scale / divisor)
//
// e8m0 and e4m3 are exact in bfloat16, and so is a code times either: the products of a kernel with bfloat16 operands
// need no sums by group. NVFP4 has one divisor for all of a weight; every row has it, so that weights can be joined.
#pragma once

#include "int4/layout.h"

namespace qao::fp4 {

constexpr int64_t kMxGroup = 32, kNvGroup = 16;
constexpr int kRowParts = 3;

// The value of each code.
constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

QAO_HOST_DEVICE constexpr int64_t groups(int64_t k, int64_t group_size) { return (k + group_size - 1) / group_size; }
// Dimension 1 of the scales.
QAO_HOST_DEVICE constexpr int64_t scale_rows(int64_t k, int64_t group_size) {
  return groups(k, group_size) + (group_size == kNvGroup ? kRowParts : 0);
}

}  // namespace qao::fp4
