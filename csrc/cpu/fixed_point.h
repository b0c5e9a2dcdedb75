// Rules for converting x to fixed point (format in gemm/job.h).
// Each instruction set implements the packing. `static`: see numeric.h.
//
// A power of two scales each chunk so that its largest magnitude has 15 bits. Another word adds 15 bits; float32 has
// two words. Values far below the largest keep fewer bits than their dtype has. That is fine if they are few, since
// they hardly count next to the largest. If they are many, their sum counts where W is small at the large values. Then
// a few large values become outliers: they are left out of the chunk, and add_outliers.cpp adds their products. If
// there are more of them, the chunk gets one more word. A chunk too wide even for that leaves out as many as necessary.
// A row is recomputed in float32 if it has too many outliers, or if its magnitudes form a ladder and outliers are only
// the top. These decisions depend only on the chunk and the row.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/numeric.h"

namespace qao::cpu {

constexpr int kStep = 16;  // columns per k-step of a tile
constexpr int kInfinityBits = 0x7F800000;
constexpr int kMinExponent = 15;  // biased; keeps the scale 2^(exponent - 127 - 14) a normal float
// Added to the bits of the largest magnitude: from 1.984 * 2^e on the exponent becomes e + 1, so that the rounded high
// byte of a word is at most 127.
constexpr int kHeadroom = 0x020000;

// How many powers of two below the chunk's largest value a value still keeps all bits of its dtype, with this many
// words.
static inline int reach(DType dtype, int words) {
  return (dtype == DType::kFloat16 ? 4 : dtype == DType::kBFloat16 ? 7 : -9) + kWordShift * (words - 1);
}

// A chunk is spread if at least this share of its nonzero values lies this many powers of two below its reach. Of
// Gaussian values, 10 to 20 % lie below the reach of float16, and half as many with every further power of two. A chunk
// with all words uses last_share, relative to its nonzero values beyond the first 16; with up to 32 nonzero values, a
// single one below the limit suffices. Tails of GELU outputs extend down to 0.
struct Limit {
  int beyond, share, last_share;  // in 32nds
};
constexpr Limit kLimits[] = {{0, 18, 16}, {1, 12, 10}, {2, 10, 10}, {3, 7, 10}, {5, 3, 10}};
constexpr int kLimitCount = 5;

struct Counts {
  int nonzero, below[kLimitCount];  // nonzero values below each limit
};
static inline bool is_spread(const Counts& counts, bool last) {
  const int nonzero = !last ? counts.nonzero : counts.nonzero > 32 ? counts.nonzero - 16 : 0;
  for (int i = 0; i < kLimitCount; ++i) {
    const int share = last ? kLimits[i].last_share : kLimits[i].share;
    if (counts.below[i] > 0 && counts.below[i] * 32 >= nonzero * share) return true;
  }
  return false;
}

// A row has a gap if one or two powers of two beyond the reach of its chunks hold almost none of the values further
// down, and those are at least a sixteenth of the row. Such values are of another kind, even if most chunks have too
// few of them to notice. Tails of GELU, SiLU and gated outputs fall off slowly.
static inline void add(const Counts& chunk, Counts* row) {
  row->nonzero += chunk.nonzero;
  for (int i = 0; i < kLimitCount; ++i) row->below[i] += chunk.below[i] > 0 ? chunk.below[i] : 0;
}
static inline bool has_gap(const Counts& row) {
  for (int i = 1; i < kLimitCount; ++i) {
    const int further = row.below[i];
    if (further > 0 && further * 16 >= row.nonzero && (row.below[i - 1] - further) * 10 <= further) return true;
  }
  return false;
}

// Number of outliers in a chunk of 64, 128 or 256 columns that cost less than one more word.
static inline int64_t few_outliers(int64_t count) { return count < 256 ? 1 : 2; }

// Number of outliers in a row of K values beyond which recomputing it in float32 costs no more.
static inline int64_t outliers_allowed(int64_t k) { return 16 + k / 8; }

// Moves the largest of values[0 .. count) to the outliers, as few as possible but all of one exponent together, until
// the rest is not spread. Returns false and changes nothing if that takes more than `most`. `last`: see is_spread().
struct Rest {
  int largest;  // bits of the largest magnitude
  Counts counts;
};
[[gnu::noinline, maybe_unused]] static bool move_outliers(float* values, int64_t count, int reach, bool last,
                                                          int64_t most, uint64_t* outliers, Rest* rest) {
  int up_to[256] = {};  // nonzero values with this exponent or less
  for (int64_t i = 0; i < count; ++i) ++up_to[float_to_bits(values[i]) >> 23 & 0xFF];
  up_to[0] = 0;
  for (int e = 1; e < 256; ++e) up_to[e] += up_to[e - 1];
  int top = rest->largest >> 23;
  const auto count_below = [&] {
    Counts counts = {up_to[top], {}};
    for (int i = 0; i < kLimitCount; ++i) {
      const int exponent = top - reach - kLimits[i].beyond;
      counts.below[i] = exponent > 0 ? up_to[exponent - 1] : 0;
    }
    return counts;
  };
  while (is_spread(count_below(), last)) --top;
  if (up_to[255] - up_to[top] > most) return false;
  *rest = {0, count_below()};
  for (int64_t i = 0; i < count; ++i) {
    const int bits = static_cast<int>(float_to_bits(values[i]) & 0x7FFFFFFF);
    if (bits >> 23 > top) {
      outliers[i / kTileColumns] |= uint64_t{1} << i % kTileColumns;
      values[i] = 0;
    } else if (bits > rest->largest) {
      rest->largest = bits;
    }
  }
  return true;
}

// Form of a chunk: its number of words, and the bits of its largest magnitude without outliers. `count_below` (bits of
// the largest, reach) counts the chunk's values. `outliers` belongs to the chunk, `row` and `remark` to the row. A row
// with a gap is packed again, with all words.
struct Form {
  int words, largest;
};
template <typename Count>
static Form choose_form(const Job& job, float* values, int64_t count, int bits, const Count& count_below, bool gap,
                        uint64_t* outliers, Counts* row, uint8_t* remark) {
  const int few = reach(job.x_dtype, job.fixed_point.words), all = reach(job.x_dtype, job.fixed_point.words + 1);
  Rest rest = {bits, {}};
  if (!gap) {
    rest.counts = count_below(bits, few);
    const bool fits = !is_spread(rest.counts, false) ||
                      (job.fixed_point.segment_places == nullptr &&  // another word costs GGUF W little
                       move_outliers(values, count, few, false, few_outliers(count), outliers, &rest));
    add(rest.counts, row);
    if (fits) return {job.fixed_point.words, rest.largest};
  }
  if (is_spread(count_below(bits, all), true)) {
    if (job.fixed_point.segment_places != nullptr) {
      *remark |= kIsWide;
      return {job.fixed_point.words + 1, bits};
    }
    move_outliers(values, count, all, true, count, outliers, &rest);
    if (rest.counts.below[0] * 8 > rest.counts.nonzero) *remark |= kIsWide;  // a ladder
  }
  return {job.fixed_point.words + 1, rest.largest};
}

// Records the form of a chunk of row m. Returns the biased exponent of its largest magnitude.
[[maybe_unused]] static int set_form(const Job& job, int64_t m, int64_t chunk, const Form& form) {
  const int exponent =
      (form.largest + kHeadroom) >> 23 > kMinExponent ? (form.largest + kHeadroom) >> 23 : kMinExponent;
  job.fixed_point.scales[m * job.fixed_point.chunks + chunk] =
      bits_to_float(static_cast<uint32_t>(exponent - 14) << 23);
  job.fixed_point.chunk_words[m * job.fixed_point.chunks + chunk] = static_cast<uint8_t>(form.words);
  if (form.words > job.fixed_point.words) job.remarks[m] |= kHasMoreWords;
  return exponent;
}

// Products of outliers summed before they are added to the rest, which keeps rounding errors small.
constexpr int64_t kOutliersAtOnce = 16;

// Records in the remarks of row m what the driver must fix for its outliers. [tiles_k], one bit per column.
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
