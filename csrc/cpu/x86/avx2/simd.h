// AVX2 loads, stores and conversions. `static`: see numeric.h.
#pragma once

#include <immintrin.h>

#include "cpu/numeric.h"

namespace qao::cpu {

// Loads data[index .. index + 8) as float32.
static inline __m256 load8(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return _mm256_loadu_ps(static_cast<const float*>(data) + index);
  const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(data) + index));
  if (dtype == DType::kFloat16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

// Loads the first `count` (1..8) values, 0 for the others; reads no further.
static inline __m256 load_first(const void* data, int64_t index, DType dtype, int64_t count) {
  if (count >= 8) return load8(data, index, dtype);
  alignas(32) float values[8] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = load(data, index + i, dtype);
  return _mm256_load_ps(values);
}

static inline __m128i to_bf16(__m256 value) {
  const __m256i bits = _mm256_castps_si256(value);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7FFF)), odd);
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
  const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

// Stores the first `count` (1..8) values to data[index .. index + count).
static inline void store_first(void* data, int64_t index, DType dtype, __m256 value, int64_t count) {
  if (count < 8) {
    alignas(32) float values[8];
    _mm256_store_ps(values, value);
    for (int64_t i = 0; i < count; ++i) store(data, index + i, dtype, values[i]);
  } else if (dtype == DType::kFloat32) {
    _mm256_storeu_ps(static_cast<float*>(data) + index, value);
  } else {
    const __m128i half = dtype == DType::kFloat16 ? _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bf16(value);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(data) + index), half);
  }
}

// Transposes 8 x 8 words of 32 bits in place.
__attribute__((always_inline)) static inline void transpose8(__m256i (&a)[8]) {
  __m256i b[8];
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 2) {
    b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
    b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; i += 4) {
    a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
    a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
    a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
    a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {
    b[i] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x20);
    b[i + 4] = _mm256_permute2x128_si256(a[i], a[i + 4], 0x31);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 8; ++i) a[i] = b[i];
}

// The sum of all lanes.
static inline float lane_sum(__m256 a) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// e^v: 2^n times a polynomial in the remainder, at most ln(2) / 2 in magnitude. Relative error 2^-23 for normal
// results.
static inline __m256 exponential(__m256 v) {
  const __m256 n = _mm256_round_ps(_mm256_mul_ps(v, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m256 rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), v);
  rest = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), rest);
  __m256 sum = _mm256_set1_ps(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm256_fmadd_ps(sum, rest, _mm256_set1_ps(coefficient));
  }
  // 2^n as the product of two powers, each a normal float.
  const __m256i whole = _mm256_cvtps_epi32(n), half = _mm256_srai_epi32(whole, 1);
  const auto power = [](__m256i exponent) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(exponent, _mm256_set1_epi32(127)), 23));
  };
  return _mm256_mul_ps(_mm256_mul_ps(sum, power(half)), power(_mm256_sub_epi32(whole, half)));
}

}  // namespace qao::cpu
