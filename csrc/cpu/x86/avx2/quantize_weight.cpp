// Quantization of weight groups with AVX2: sixteen lanes in two registers.
#include <immintrin.h>

#include "cpu/quantize_group.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {
namespace {

struct Two {
  __m256 a, b;  // lanes 0..7 and 8..15
  static Two all(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Two load(const float* values) { return {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)}; }
};

inline Two add(Two x, Two y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline Two sub(Two x, Two y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline Two mul(Two x, Two y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline Two div(Two x, Two y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline Two least(Two x, Two y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
inline Two largest(Two x, Two y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }

inline float lowest_of(Two x) {
  const __m256 eight = _mm256_min_ps(x.a, x.b);
  __m128 four = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  four = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(four, _mm_movehdup_ps(four)));
}
inline float sum_of(Two x) { return lane_sum(_mm256_add_ps(x.a, x.b)); }
inline __m128i to_eight_bytes(__m256 x) {
  const __m256i low = _mm256_and_si256(_mm256_castps_si256(x), _mm256_set1_epi32(0xFF));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(low), _mm256_extracti128_si256(low, 1));
  return _mm_packus_epi16(words, words);
}
inline void to_bytes(Two x, uint8_t (&bytes)[kLanes]) {
  const __m128i both = _mm_unpacklo_epi64(to_eight_bytes(x.a), to_eight_bytes(x.b));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(bytes), both);
}

}  // namespace

const GroupKernels avx2::kGroups = group_kernels<Two>;

}  // namespace qao::cpu
