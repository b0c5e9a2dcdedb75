// Codes of an int4 W less the whole part of their zero point, as e4m3, exactly. Where the weight is 0 so is the
// operand: an outlier of x in such a column adds nothing to the sums, which the tensor cores cut short beside a large
// term.
#pragma once

#include <cstdint>

namespace qao::centred {

// The code nearest to a zero point, in the lowest bits of a float; NaN gives a bound.
__device__ __forceinline__ float on_whole_code(float zero) { return fminf(fmaxf(zero, 0.0f), 15.0f) + 0x1p23f; }
// What is left of the zero point, times a sum of x, comes off the float32 sums.
__device__ __forceinline__ float fraction(float zero) { return zero - (on_whole_code(zero) - 0x1p23f); }
// The code in each byte.
__device__ __forceinline__ uint32_t four_codes(float zero) {
  return __float_as_uint(on_whole_code(zero)) * 0x01010101 - __float_as_uint(0x1p23f);
}

// Four nibbles less `codes`: sign and magnitude. A byte up to 15 is the e4m3 value of 2^-9 times itself, since
// subnormals and the first binade have one step. The tensor cores of Hopper align a product by a code below 8 as if the
// code were 8: up to three bits of what is added to it are lost.
constexpr float kE4m3Factor = 0x1p9f;
__device__ __forceinline__ uint32_t e4m3_bytes(uint32_t nibbles, uint32_t codes) {
  const uint32_t not_less = nibbles + (0x80808080 - codes);  // in the top bits of the bytes
  return __vabsdiffu4(nibbles, codes) | (~not_less & 0x80808080);
}

// Of rows g and g + 8, the lower and the upper nibbles of a word's bytes.
struct Codes {
  uint32_t row[2];
};
__device__ __forceinline__ void e4m3_rows(uint32_t word, const Codes& codes, uint32_t& row, uint32_t& row_of_upper) {
  row = e4m3_bytes(word & 0x0F0F0F0F, codes.row[0]);
  row_of_upper = e4m3_bytes(word >> 4 & 0x0F0F0F0F, codes.row[1]);
}

}  // namespace qao::centred
