// AVX-512 loads, stores, conversions and the transpose. `static`: see numeric.h.
#pragma once

// GCC 12 warns about the undefined operand inside its unmasked intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif
#include <immintrin.h>

#include "qao/types.h"

namespace qao::cpu {

static inline __mmask16 first(int64_t count) {
  return count >= 16 ? __mmask16{0xFFFF} : static_cast<__mmask16>((1u << (count > 0 ? count : 0)) - 1);
}

// Loads data[index .. index + 16) as float32. Where `mask` is 0, the result is 0 and nothing is read.
static inline __m512 load16(const void* data, int64_t index, DType dtype, __mmask16 mask = 0xFFFF) {
  if (dtype == DType::kFloat32) return _mm512_maskz_loadu_ps(mask, static_cast<const float*>(data) + index);
  const __m256i half = _mm256_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(data) + index);
  if (dtype == DType::kFloat16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Rounds to bfloat16 in the upper halves of words; not for NaN.
static inline __m512i round_to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  return _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7FFF)), odd);
}

static inline __m256i to_bf16(__m512 value) {
  const __m512i bits = _mm512_castps_si512(value), rounded = round_to_bf16(value);
  const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
  const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(quiet, 16));
}

// Upper halves of words, in order.
static inline __m512i upper_halves(__m512i low, __m512i high) {
  alignas(64) static constexpr uint16_t kUpperHalves[32] = {1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21,
                                                            23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43,
                                                            45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
  return _mm512_permutex2var_epi16(low, _mm512_load_si512(kUpperHalves), high);
}

static inline __m512i to_bf16_pair(__m512 low, __m512 high) {
  if (_mm512_cmp_ps_mask(low, high, _CMP_UNORD_Q) != 0) [[unlikely]] {
    return _mm512_inserti64x4(_mm512_castsi256_si512(to_bf16(low)), to_bf16(high), 1);
  }
  return upper_halves(round_to_bf16(low), round_to_bf16(high));
}

// Rounds values below 464 to the nearest e4m3, as float32: after adding 1.5 * 2^20 times the power of two below a
// value, at least 2^-6, float32 has no more bits than e4m3. -0 becomes 0.
static inline __m512 rounded_to_fp8(__m512 values) {
  const __m512i power = _mm512_and_si512(_mm512_castps_si512(values), _mm512_set1_epi32(0x7F800000));
  const __m512i least = _mm512_max_epu32(power, _mm512_set1_epi32((127 - 6) << 23));
  const __m512 large = _mm512_castsi512_ps(_mm512_add_epi32(least, _mm512_set1_epi32((20 << 23) + (1 << 22))));
  return _mm512_sub_ps(_mm512_add_ps(values, large), large);
}

// Stores value[i] to data[index + i] where `mask` is 1.
static inline void store16(void* data, int64_t index, DType dtype, __m512 value, __mmask16 mask) {
  if (dtype == DType::kFloat32) {
    _mm512_mask_storeu_ps(static_cast<float*>(data) + index, mask, value);
  } else {
    const __m256i half = dtype == DType::kFloat16 ? _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT) : to_bf16(value);
    _mm256_mask_storeu_epi16(static_cast<uint16_t*>(data) + index, mask, half);
  }
}

// Stores value i of both vectors to data[index + i] where i < count.
static inline void store32(void* data, int64_t index, DType dtype, __m512 low, __m512 high, int64_t count) {
  if (dtype == DType::kBFloat16) {
    const __mmask32 mask = count >= 32 ? ~__mmask32{0} : (__mmask32{1} << count) - 1;
    _mm512_mask_storeu_epi16(static_cast<uint16_t*>(data) + index, mask, to_bf16_pair(low, high));
  } else {
    store16(data, index, dtype, low, first(count));
    store16(data, index + 16, dtype, high, first(count - 16));
  }
}

// 16 rows of 64 bytes are transposed in two steps, half of the first by loads. Halves: a[8 h + i] has columns 32 h to
// 32 h + 31 of rows i and i + 4, a[8 h + i + 4] those of rows i + 8 and i + 12, for i < 4.
__attribute__((always_inline)) static inline __m512i load_halves(const uint8_t* row, const uint8_t* other) {
  const __m512i half = _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row)));
  return _mm512_inserti64x4(half, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(other)), 1);
}

// In place: a[4 j + i] has columns 16 j to 16 j + 15 of rows i, i + 4, i + 8 and i + 12, one in each 128-bit lane.
__attribute__((always_inline)) static inline void halves_to_lanes(__m512i (&a)[16]) {
#pragma GCC unroll 2
  for (int h = 0; h < 16; h += 8) {
#pragma GCC unroll 4
    for (int i = h; i < h + 4; ++i) {
      const __m512i first = a[i], second = a[i + 4];
      a[i] = _mm512_shuffle_i32x4(first, second, 0x88);
      a[i + 4] = _mm512_shuffle_i32x4(first, second, 0xDD);
    }
  }
}

// In place: a[i] has columns 4 i to 4 i + 3 of every row, one word each.
__attribute__((always_inline)) static inline void lanes_to_quads(__m512i (&a)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i low01 = _mm512_unpacklo_epi32(a[i], a[i + 1]), high01 = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    const __m512i low23 = _mm512_unpacklo_epi32(a[i + 2], a[i + 3]), high23 = _mm512_unpackhi_epi32(a[i + 2], a[i + 3]);
    a[i] = _mm512_unpacklo_epi64(low01, low23), a[i + 1] = _mm512_unpackhi_epi64(low01, low23);
    a[i + 2] = _mm512_unpacklo_epi64(high01, high23), a[i + 3] = _mm512_unpackhi_epi64(high01, high23);
  }
}

// The same, but in each lane the first two columns of its four rows come before the other two.
__attribute__((always_inline)) static inline void lanes_to_pairs(__m512i (&a)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    const __m512i low01 = _mm512_unpacklo_epi16(a[i], a[i + 1]), high01 = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    const __m512i low23 = _mm512_unpacklo_epi16(a[i + 2], a[i + 3]), high23 = _mm512_unpackhi_epi16(a[i + 2], a[i + 3]);
    a[i] = _mm512_unpacklo_epi32(low01, low23), a[i + 1] = _mm512_unpackhi_epi32(low01, low23);
    a[i + 2] = _mm512_unpacklo_epi32(high01, high23), a[i + 3] = _mm512_unpackhi_epi32(high01, high23);
  }
}

// Transposes 16 x 16 words of 32 bits in place.
__attribute__((always_inline)) static inline void transpose16(__m512i (&a)[16]) {
  lanes_to_quads(a);
  // Each 128-bit lane now holds a transposed 4 x 4 block; next, the blocks are transposed.
  __m512i b[16];
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i even01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88),
                  odd01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xDD);
    const __m512i even23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
    const __m512i odd23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xDD);
    b[i] = _mm512_shuffle_i32x4(even01, even23, 0x88);
    b[i + 8] = _mm512_shuffle_i32x4(even01, even23, 0xDD);
    b[i + 4] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
    b[i + 12] = _mm512_shuffle_i32x4(odd01, odd23, 0xDD);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) a[i] = b[i];
}

// e^v: 2^n times a polynomial in the remainder, at most ln(2) / 2 in magnitude. Relative error 2^-23.
static inline __m512 exponential(__m512 v) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
  }
  return _mm512_scalef_ps(sum, n);
}

}  // namespace qao::cpu
