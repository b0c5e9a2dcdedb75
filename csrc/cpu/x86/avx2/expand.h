// Exact conversion of bytes of W or x to float32: 16 columns in order. `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {

// e4m3 is a float16 with a short mantissa, except for the exponent bias (2^-8 of the value) and NaN.
__attribute__((always_inline)) static inline void expand_fp8(__m128i bytes, __m256 (&out)[2]) {
  const __m256i half = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), _mm256_set1_epi16(-0x4080));
  const __m256i magnitude = _mm256_set1_epi16(0x3F80);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(half, magnitude), magnitude);
  const __m256i value = _mm256_or_si256(half, _mm256_and_si256(nan, _mm256_set1_epi16(0x7C00)));
  const __m256 bias = _mm256_set1_ps(256);
  out[0] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(value)), bias);
  out[1] = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(value, 1)), bias);
}

__attribute__((always_inline)) static inline void expand_int8(__m128i bytes, __m256 (&out)[2]) {
  out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
  out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(bytes, 8)));
}

}  // namespace qao::cpu
