// The rules of x in fixed point, whose form mm_job.h describes; each instruction set packs it. `static`: see numeric.h.
//
// A power of two scales each chunk so that its largest magnitude has 15 bits; the second word of float32 adds 15 more.
// What is far below the largest keeps fewer bits than its dtype. That is right where few values are: beside the largest
// they hardly count. Where most are (an outlier: their sum counts, if W is small at the outlier's column), the largest
// are left out of the chunk, and add_outliers.cpp adds their products. It is for the chunk alone to say.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/numeric.h"

namespace qao::cpu {

constexpr int kStep = 16;  // columns of one k-step of a tile
constexpr int kInfinityBits = 0x7F800000;
constexpr int kMinExponent = 15;  // biased; keeps the scale 2^(exponent - 127 - 14) a normal float
// Added to the bits of the largest magnitude: from 1.984 * 2^e on it takes exponent e + 1, so that the high byte of a
// word, rounded, is at most 127.
constexpr int kHeadroom = 0x020000;

// A value further than this many powers of two below the largest is coarse: its error is more than half a last bit of
// its dtype.
static inline int coarse_exponents(DType dtype) { return dtype == DType::kFloat16 ? 4 : 6; }
// How many of a chunk's nonzero values may be coarse. Of a gaussian 2 to 5 % are, of float16 10 to 20 %.
static inline int64_t coarse_allowed(int64_t nonzero) { return nonzero > 16 ? (nonzero - 16) * 3 / 4 : 0; }

// Moves the largest of values[0 .. count), as few as possible and those of one exponent together, to the outliers,
// until no more of the others are coarse than may be. Returns the bits of the largest that stays.
[[gnu::noinline, maybe_unused]] static int move_outliers(float* values, int64_t count, int coarse, uint64_t* outliers) {
  int64_t up_to[256] = {};  // nonzero values of this exponent or less
  for (int64_t i = 0; i < count; ++i) ++up_to[float_to_bits(values[i]) >> 23 & 0xFF];
  up_to[0] = 0;
  for (int e = 1; e < 256; ++e) up_to[e] += up_to[e - 1];
  int top = 254;
  while (top > coarse && up_to[top - coarse - 1] > coarse_allowed(up_to[top])) --top;
  int largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int bits = static_cast<int>(float_to_bits(values[i]) & 0x7FFFFFFF);
    if (bits >> 23 > top) {
      outliers[i / kTileColumns] |= uint64_t{1} << i % kTileColumns;
      values[i] = 0;
    } else if (bits > largest) {
      largest = bits;
    }
  }
  return largest;
}

}  // namespace qao::cpu
