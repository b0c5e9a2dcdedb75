// Packing of x as fixed point for kernels that multiply bytes (format in gemm/job.h).
#include "cpu/fixed_point_rows.h"
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/simd.h"
#include "layout/int4.h"

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

// The upper 16 bits of a magnitude suffice for comparing it with a power of two.
Counts count_chunk(const float* values, int64_t count, int largest, int reach) {
  const __m256i magnitude = _mm256_set1_epi16(0x7FFF);
  const auto limit_of = [](int exponent) {
    return _mm256_set1_epi16(static_cast<int16_t>(exponent > 0 ? exponent << 7 : 0));
  };
  const __m256i smallest = limit_of(1);                                             // values below it count as 0
  __m256i limits[kLimitCount], below[kLimitCount], zeros = _mm256_setzero_si256();  // minus the counts
  for (int i = 0; i < kLimitCount; ++i) {
    limits[i] = limit_of((largest >> 23) - reach - kLimits[i].beyond);
    below[i] = zeros;
  }
  for (int64_t j = 0; j < count; j += 16) {
    const __m256i* bits = reinterpret_cast<const __m256i*>(values + j);
    const __m256i upper = _mm256_and_si256(_mm256_packus_epi32(_mm256_srli_epi32(_mm256_load_si256(bits), 16),
                                                               _mm256_srli_epi32(_mm256_load_si256(bits + 1), 16)),
                                           magnitude);
    zeros = _mm256_add_epi16(zeros, _mm256_cmpgt_epi16(smallest, upper));
#pragma GCC unroll 5
    for (int i = 0; i < kLimitCount; ++i) below[i] = _mm256_add_epi16(below[i], _mm256_cmpgt_epi16(limits[i], upper));
  }
  const __m256i ones = _mm256_set1_epi16(-1);
  const auto sums_of = [&](__m256i a, __m256i b, __m256i c, __m256i d) {
    const __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(_mm256_madd_epi16(a, ones), _mm256_madd_epi16(b, ones)),
                                            _mm256_hadd_epi32(_mm256_madd_epi16(c, ones), _mm256_madd_epi16(d, ones)));
    return _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  };
  alignas(16) int sums[8];
  _mm_store_si128(reinterpret_cast<__m128i*>(sums), sums_of(zeros, below[0], below[1], below[2]));
  _mm_store_si128(reinterpret_cast<__m128i*>(sums + 4), sums_of(below[3], below[4], zeros, zeros));
  Counts counts = {static_cast<int>(count) - sums[0], {}};
  for (int i = 0; i < kLimitCount; ++i) counts.below[i] = sums[i + 1] - sums[0];
  return counts;
}

// Reorders four k-steps of 16 bytes each from natural order to the order of tile_column().
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

// Stores high and low bytes to out[0..64) and out[64..128), and the sums of each step.
void store_words(const __m256i (&words)[4], int8_t* out, int* step_sums, const uint8_t* places) {
  __m128i high[4], low[4];
  for (int step = 0; step < 4; ++step) {
    const __m256i upper = _mm256_srai_epi16(_mm256_add_epi16(words[step], _mm256_set1_epi16(128)), 8);
    const __m256i lower = _mm256_and_si256(words[step], _mm256_set1_epi16(0xFF));
    high[step] = _mm_packs_epi16(_mm256_castsi256_si128(upper), _mm256_extracti128_si256(upper, 1));
    low[step] = _mm_packus_epi16(_mm256_castsi256_si128(lower), _mm256_extracti128_si256(lower, 1));
    step_sums[step] += horizontal_sum(_mm256_madd_epi16(words[step], _mm256_set1_epi16(1)));
  }
  for (int step = 0; places != nullptr && step < 4; ++step) {
    int8_t* at = out + places[step] / 4 * 2 * kTileK + places[step] % 4 * kStep;
    _mm_store_si128(reinterpret_cast<__m128i*>(at), high[step]);
    _mm_store_si128(reinterpret_cast<__m128i*>(at + kTileK), low[step]);
  }
  if (places != nullptr) return;
  store_tile(high, out);
  store_tile(low, out + kTileK);
}

__m256i pack_words(__m256i first8, __m256i second8) {
  return _mm256_permute4x64_epi64(_mm256_packs_epi32(first8, second8), 0xD8);
}

void pack_tile(const float* values, float inverse, int words, int8_t* const* out, int (*step_sums)[4],
               const uint8_t* places) {
  __m256i packed[kMaxWords][4];
  for (int step = 0; step < 4; ++step) {
    __m256 rest[2];
    for (int half = 0; half < 2; ++half) {
      rest[half] = _mm256_mul_ps(_mm256_load_ps(values + step * kStep + half * 8), _mm256_set1_ps(inverse));
    }
    for (int w = 0; w < words; ++w) {
      __m256i whole[2];
      for (int half = 0; half < 2; ++half) {
        whole[half] = _mm256_cvtps_epi32(rest[half]);
        rest[half] = _mm256_sub_ps(rest[half], _mm256_cvtepi32_ps(whole[half]));  // exact, like the next line
        rest[half] = _mm256_mul_ps(rest[half], _mm256_set1_ps(1 << kWordShift));
      }
      packed[w][step] = pack_words(whole[0], whole[1]);
    }
  }
  for (int w = 0; w < words; ++w) store_words(packed[w], out[w], step_sums[w], places);
}

}  // namespace

void avx2::pack_fixed_point(const Job& job, int64_t begin, int64_t end) { pack_rows(job, begin, end); }

}  // namespace qao::cpu
