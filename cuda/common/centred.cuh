// int4 codes minus the integer part of their zero point, as exact e4m3.
//
// A zero weight gives a zero operand, so an outlier of x in that column does not affect the accumulator, which the
// tensor cores truncate relative to the largest term.
#pragma once

#include <cstdint>

namespace qao::centred {

// Integer code nearest to a zero point, in the low bits of a float; NaN gives a bound.
__device__ __forceinline__ float on_whole_code(float zero) { return fminf(fmaxf(zero, 0.0f), 15.0f) + 0x1p23f; }
// Remainder of the zero point. Multiplied by a sum of x, it is subtracted from the float32 accumulators.
__device__ __forceinline__ float fraction(float zero) { return zero - (on_whole_code(zero) - 0x1p23f); }
// The integer code, replicated in four bytes.
__device__ __forceinline__ uint32_t four_codes(float zero) {
  return __float_as_uint(on_whole_code(zero)) * 0x01010101 - __float_as_uint(0x1p23f);
}

// Four nibbles minus `codes`, as sign and magnitude. A byte b up to 15 is the e4m3 value b * 2^-9: subnormals and the
// first binade have the same step. Hopper's tensor cores align a product with a code below 8 as if the code were 8, so
// up to three bits of other addends are lost.
constexpr float kE4m3Factor = 0x1p9f;
__device__ __forceinline__ uint32_t e4m3_bytes(uint32_t nibbles, uint32_t codes) {
  const uint32_t not_less = nibbles + (0x80808080 - codes);  // flags in the top bits of the bytes
  return __vabsdiffu4(nibbles, codes) | (~not_less & 0x80808080);
}

// Integer zero points of rows g and g + 8: the lower and the upper nibbles of a word.
struct Codes {
  uint32_t row[2];
};
__device__ __forceinline__ void e4m3_rows(uint32_t word, const Codes& codes, uint32_t& row, uint32_t& row_of_upper) {
  row = e4m3_bytes(word & 0x0F0F0F0F, codes.row[0]);
  row_of_upper = e4m3_bytes(word >> 4 & 0x0F0F0F0F, codes.row[1]);
}

}  // namespace qao::centred
