// Rows of x as fixed point, for the kernels that multiply bytes (mm_job.h describes the form).
#include "cpu/fixed_point.h"
#include "cpu/mm_kernels.h"
#include "cpu/x86/avx2/simd.h"
#include "int4/layout.h"

namespace qao::cpu {
namespace {

using int4::kTileK;

int horizontal_max(__m256i v) {
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4E));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xB1));
  return _mm_cvtsi128_si32(m);
}

int horizontal_sum(__m256i v) {
  __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4E));
  s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xB1));
  return _mm_cvtsi128_si32(s);
}

// values[0 .. count) = x, then zeros up to a whole tile; returns the bits of the largest magnitude. Inf and NaN become
// 0 and outliers.
int load_chunk(const Job& job, int64_t index, int64_t count, int64_t padded, float* values, uint64_t* outliers) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF), infinity = _mm256_set1_epi32(kInfinityBits);
  __m256i largest = _mm256_setzero_si256();
  for (int64_t i = 0; i < padded; i += 8) {
    __m256 v = i < count ? load_first(job.x, index + i, job.x_dtype, count - i) : _mm256_setzero_ps();
    __m256i bits = _mm256_and_si256(_mm256_castps_si256(v), magnitude);
    const __m256i is_finite = _mm256_cmpgt_epi32(infinity, bits);
    if (const int finite = _mm256_movemask_ps(_mm256_castsi256_ps(is_finite)); finite != 0xFF) {
      outliers[i / kTileK] |= static_cast<uint64_t>(~finite & 0xFF) << i % kTileK;
      v = _mm256_and_ps(v, _mm256_castsi256_ps(is_finite));
      bits = _mm256_and_si256(bits, is_finite);
    }
    largest = _mm256_max_epi32(largest, bits);
    _mm256_store_ps(values + i, v);
  }
  return horizontal_max(largest);
}

Counts count_chunk(const float* values, int64_t count, int largest, int coarse) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  const int exponent = largest >> 23;
  const auto limit_of = [exponent](int exponents) {
    return _mm256_set1_epi32(exponent > exponents ? (exponent - exponents) << 23 : 0);
  };
  const __m256i limit = limit_of(coarse), deep_limit = limit_of(kDeepExponents);
  const __m256i tail_limit = limit_of(coarse + kTailExponents);
  const __m256i smallest = _mm256_set1_epi32(0x00800000);                             // below it: as good as 0
  __m256i below = _mm256_setzero_si256(), deep = below, tail = below, zeros = below;  // minus the number of each
  for (int64_t i = 0; i < count; i += 8) {
    const __m256i bits = _mm256_and_si256(_mm256_castps_si256(_mm256_load_ps(values + i)), magnitude);
    below = _mm256_add_epi32(below, _mm256_cmpgt_epi32(limit, bits));
    deep = _mm256_add_epi32(deep, _mm256_cmpgt_epi32(deep_limit, bits));
    tail = _mm256_add_epi32(tail, _mm256_cmpgt_epi32(tail_limit, bits));
    zeros = _mm256_add_epi32(zeros, _mm256_cmpgt_epi32(smallest, bits));
  }
  const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(zeros, below), _mm256_hadd_epi32(deep, tail));
  alignas(16) int sums[4];
  _mm_store_si128(reinterpret_cast<__m128i*>(sums),
                  _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
  const int64_t zero = -sums[0];
  return {count - zero, -sums[1] - zero, -sums[2] - zero, -sums[3] - zero};
}

// Four k-steps of 16 bytes each in natural order -> one tile in the order of tile_column().
void store_tile(const __m128i (&steps)[4], int8_t* out) {
  const __m128i order = _mm_setr_epi8(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
  const __m128i s0 = _mm_shuffle_epi8(steps[0], order), s1 = _mm_shuffle_epi8(steps[1], order);
  const __m128i s2 = _mm_shuffle_epi8(steps[2], order), s3 = _mm_shuffle_epi8(steps[3], order);
  const __m128i low01 = _mm_unpacklo_epi32(s0, s1), high01 = _mm_unpackhi_epi32(s0, s1);
  const __m128i low23 = _mm_unpacklo_epi32(s2, s3), high23 = _mm_unpackhi_epi32(s2, s3);
  __m128i* rows = reinterpret_cast<__m128i*>(out);
  _mm_store_si128(rows, _mm_unpacklo_epi64(low01, low23));
  _mm_store_si128(rows + 1, _mm_unpackhi_epi64(low01, low23));
  _mm_store_si128(rows + 2, _mm_unpacklo_epi64(high01, high23));
  _mm_store_si128(rows + 3, _mm_unpackhi_epi64(high01, high23));
}

// One tile of integer words, |word| < 2^15 - 128: its high and low bytes to out[0..64) and out[64..128), sums of each
// step.
void store_words(const __m256i (&words)[4], int8_t* out, int* step_sums) {
  __m128i high[4], low[4];
  for (int step = 0; step < 4; ++step) {
    const __m256i upper = _mm256_srai_epi16(_mm256_add_epi16(words[step], _mm256_set1_epi16(128)), 8);
    const __m256i lower = _mm256_and_si256(words[step], _mm256_set1_epi16(0xFF));
    high[step] = _mm_packs_epi16(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    low[step] = _mm_packus_epi16(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
    step_sums[step] += horizontal_sum(_mm256_madd_epi16(words[step], _mm256_set1_epi16(1)));
  }
  store_tile(high, out);
  store_tile(low, out + kTileK);
}

__m256i pack_words(__m256i first8, __m256i second8) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(first8, second8), 0xD8);
}

void pack_row(const Job& job, int64_t m) {
  alignas(32) float values[kMaxSection];
  float* sums = job.word_sums + m * job.sections * job.words;
  for (int64_t s = 0; s < job.sections * job.words; ++s) sums[s] = 0;
  uint64_t* outliers = job.outliers + m * job.tiles_k;
  for (int64_t t = 0; t < job.tiles_k; ++t) outliers[t] = 0;
  const int coarse = coarse_exponents(job.x_dtype);
  Tail tail, without_outliers;
  for (int64_t c = 0; c < job.chunks; ++c) {
    const int64_t first_tile = c * job.chunk_tiles, k0 = first_tile * kTileK;
    const int64_t tiles = job.tiles_k - first_tile < job.chunk_tiles ? job.tiles_k - first_tile : job.chunk_tiles;
    int bits = load_chunk(job, m * job.x_stride + k0, job.k - k0, tiles * kTileK, values, outliers + first_tile);
    const Counts counts = count_chunk(values, tiles * kTileK, bits, coarse);
    tail.nonzero += counts.nonzero, without_outliers.nonzero += counts.nonzero;
    if (has_outliers(counts)) {
      bits = move_outliers(values, tiles * kTileK, coarse, outliers + first_tile, job.remarks + m);
      add_tail(values, tiles * kTileK, bits, coarse, &without_outliers);
    } else if (may_have_gap(counts)) {
      add_tail(values, tiles * kTileK, bits, coarse, &tail);
    }
    const int exponent = (bits + kHeadroom) >> 23 > kMinExponent ? (bits + kHeadroom) >> 23 : kMinExponent;
    job.chunk_scales[m * job.chunks + c] = bits_to_float(static_cast<uint32_t>(exponent - 14) << 23);
    const __m256 inverse = _mm256_set1_ps(bits_to_float(static_cast<uint32_t>(268 - exponent) << 23));

    for (int64_t t = 0; t < tiles; ++t) {
      __m256i words[2][4];
      for (int step = 0; step < 4; ++step) {
        __m256i whole[2], fraction[2];
        for (int half = 0; half < 2; ++half) {
          const __m256 v = _mm256_mul_ps(_mm256_load_ps(values + t * kTileK + step * kStep + half * 8), inverse);
          whole[half] = _mm256_cvtps_epi32(v);
          const __m256 rest = _mm256_sub_ps(v, _mm256_cvtepi32_ps(whole[half]));  // exact
          fraction[half] = _mm256_cvtps_epi32(_mm256_mul_ps(rest, _mm256_set1_ps(1 << kWordShift)));
        }
        words[0][step] = pack_words(whole[0], whole[1]);
        words[1][step] = pack_words(fraction[0], fraction[1]);
      }
      int8_t* out = job.fixed_point + (m * job.tiles_k + first_tile + t) * job.words * 2 * kTileK;
      for (int w = 0; w < job.words; ++w) {
        int step_sums[4] = {};
        store_words(words[w], out + w * 2 * kTileK, step_sums);
        for (int step = 0; step < 4; ++step) {
          const int64_t section = (k0 + t * kTileK + step * kStep) / job.section;
          if (section < job.sections) sums[section * job.words + w] += static_cast<float>(step_sums[step]);  // exact
        }
      }
    }
  }
  if (has_gap(tail) || has_gap(without_outliers)) job.remarks[m] |= kIsWide;
  remark_outliers(job, m, outliers);
}

}  // namespace

void avx2::pack_fixed_point(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) pack_row(job, m);
}

}  // namespace qao::cpu
