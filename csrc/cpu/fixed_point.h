// The rules of x in fixed point, whose form mm_job.h describes; each instruction set packs it. `static`: see numeric.h.
//
// A power of two scales each chunk so that its largest magnitude has 15 bits; the second word of float32 adds 15 more.
// What is far below the largest keeps fewer bits than its dtype. That is right where few values are: beside the largest
// they hardly count. Where most are (an outlier: their sum counts, if W is small at the outlier's column), the largest
// are left out of the chunk, and add_outliers.cpp adds their products. It is for the chunk alone to say. A row that
// leaves many out has no use for fixed point, nor has one whose magnitudes are of two kinds, far apart with next to
// nothing between: it is computed anew, in float32.
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
// And how many may be deep, so far below that at most 6 bits are left (float32: 21). Of GELU's and SiLU's outputs up to
// 44 % are in chunks of 64.
constexpr int kDeepExponents = 8;
static inline int64_t deep_allowed(int64_t nonzero) { return nonzero * 9 / 20; }

// How many may be deep beside outliers: more are a ladder of magnitudes, of which outliers are but the top.
static inline int64_t deep_beside_outliers(int64_t nonzero) { return nonzero / 4; }

// Of a chunk: its nonzero values, and those of them that are coarse, deep, or in the tail.
struct Counts {
  int64_t nonzero, coarse, deep, tail;
};
constexpr int kTailExponents = 2;  // beyond coarse ones: the first powers of two in which a gap may lie

[[maybe_unused]] static bool has_outliers(const Counts& counts) {
  return counts.coarse > coarse_allowed(counts.nonzero) || counts.deep > deep_allowed(counts.nonzero);
}

// Of a row: its nonzero values; and of chunks that may have a gap those more than coarse + i powers of two below the
// largest of their chunk. Chunks without their outliers count apart: their gap lies elsewhere.
constexpr int kTailLength = 6;
struct Tail {
  int64_t nonzero = 0, below[kTailLength] = {};
};
// What counts as a kind: a sixteenth of the row. The activations of language models hardly reach that, or fall off
// slowly: those with a longer tail (GELU and SiLU of large values, their products with gates) have a quarter or more of
// what lies further down within any two powers of two. In a gap of two, at most a tenth of that may lie.
constexpr int64_t kKindShare = 16, kFewestOfKind = 16, kGapShare = 10;

// Whether it is worth a closer look: few ordinary chunks have as many in the tail with as few before it, or as many
// deep.
[[maybe_unused]] static bool may_have_gap(const Counts& counts) {
  const bool falls_off = (counts.coarse - counts.tail) * 2 > counts.tail && counts.deep * 8 < counts.nonzero;
  return counts.tail * kKindShare >= counts.nonzero && !falls_off;
}

[[maybe_unused]] static void add_tail(const float* values, int64_t count, int largest, int coarse, Tail* tail) {
  for (int i = 0; i < kTailLength; ++i) {
    const int exponent = (largest >> 23) - coarse - i;
    const uint32_t limit = exponent > 1 ? static_cast<uint32_t>(exponent) << 23 : 0x00800000;
    int below = 0;
    for (int64_t j = 0; j < count; ++j) {
      const uint32_t bits = float_to_bits(values[j]) & 0x7FFFFFFF;
      below += bits >= 0x00800000 && bits < limit;
    }
    tail->below[i] += below;
  }
}

[[maybe_unused]] static bool has_gap(const Tail& tail) {
  for (int i = 0; i + kTailExponents < kTailLength; ++i) {
    const int64_t further = tail.below[i + kTailExponents];
    const bool many = further >= kFewestOfKind && further * kKindShare >= tail.nonzero;
    if (many && (tail.below[i] - further) * kGapShare <= further) return true;
  }
  return false;
}

// Outliers in a row of K values, beyond which float32 sums of all of it cost no more.
static inline int64_t outliers_allowed(int64_t k) { return 16 + k / 8; }

// Moves the largest of values[0 .. count), as few as possible and those of one exponent together, to the outliers,
// until no more of the others are coarse, or deep, than may be. Returns the bits of the largest that stays. `remark` is
// the row's.
[[gnu::noinline, maybe_unused]] static int move_outliers(float* values, int64_t count, int coarse, uint64_t* outliers,
                                                         uint8_t* remark) {
  int64_t up_to[256] = {};  // nonzero values of this exponent or less
  for (int64_t i = 0; i < count; ++i) ++up_to[float_to_bits(values[i]) >> 23 & 0xFF];
  up_to[0] = 0;
  for (int e = 1; e < 256; ++e) up_to[e] += up_to[e - 1];
  int top = 254;
  const auto below = [&](int exponents) { return top > exponents ? up_to[top - exponents - 1] : 0; };
  while (below(coarse) > coarse_allowed(up_to[top]) || below(kDeepExponents) > deep_allowed(up_to[top])) --top;
  if (below(kDeepExponents) > deep_beside_outliers(up_to[top])) *remark |= kIsWide;
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

// Products of outliers that are summed at a time, before they are added to the others: rounding errors stay small.
constexpr int64_t kOutliersAtOnce = 16;

// What the driver must put right of row m, whose outliers are marked. [tiles_k] a bit a column.
[[maybe_unused]] static void remark_outliers(const Job& job, int64_t m, uint64_t* outliers) {
  int64_t count = 0;
  for (int64_t t = 0; t < job.tiles_k; ++t) count += __builtin_popcountll(outliers[t]);
  if (count == 0) return;
  if (count > outliers_allowed(job.k)) job.remarks[m] |= kIsWide;
  if ((job.remarks[m] & kIsWide) == 0) {
    job.remarks[m] |= kHasOutliers;
  } else {
    for (int64_t t = 0; t < job.tiles_k; ++t) outliers[t] = 0;
  }
}

}  // namespace qao::cpu
