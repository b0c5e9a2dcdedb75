// Packed layout of 4-bit float weights (MXFP4, NVFP4).
// Codes are e2m1: a sign, two exponent bits, one mantissa bit. They are placed like the nibbles of int4
// (layout/int4.h). Rows and columns past N and K hold 8, which is -0.
//
// scales   bfloat16   [N/16][groups + row parts][1][16]
//
//   MXFP4    groups of 32, scales are powers of two (e8m0), no row parts:   W = code * scale
//   NVFP4    groups of 16, scales are e4m3; then three row parts that sum
//            to a float32 divisor of the row's scales:                      W = code * (scale / divisor)
//
// e8m0 and e4m3 are exact in bfloat16, and so is their product with a code: kernels with bfloat16 operands need no sums
// per group. NVFP4 has one divisor per weight. It is stored in every row so that weights can be concatenated.
#pragma once

#include "layout/int4.h"

namespace qao::fp4 {

constexpr int64_t kMxGroup = 32, kNvGroup = 16;
constexpr int kRowParts = 3;

// Value of each code.
constexpr float kValues[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

QAO_HOST_DEVICE constexpr int64_t groups(int64_t k, int64_t group_size) { return (k + group_size - 1) / group_size; }
// Dimension 1 of the scales.
QAO_HOST_DEVICE constexpr int64_t scale_rows(int64_t k, int64_t group_size) {
  return groups(k, group_size) + (group_size == kNvGroup ? kRowParts : 0);
}

}  // namespace qao::fp4
