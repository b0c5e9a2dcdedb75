// Conversion of float32 to pairs of bfloat16, rounded once. `static`: see numeric.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace qao::cpu {

// 32-bit words with first[i] in the lower half and second[i] in the upper one.
__attribute__((always_inline)) static inline __m512i to_bf16_pairs(__m512 first, __m512 second) {
  alignas(64) static constexpr auto kInterleave = [] {
    struct {
      uint16_t order[32];
    } table = {};
    for (int i = 0; i < 32; ++i) table.order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    return table;
  }();
  const __m512bh apart = _mm512_cvtne2ps_pbh(second, first);
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleave.order), reinterpret_cast<__m512i>(apart));
}

// Multiplies 32 values in order by a scale.
__attribute__((always_inline)) static inline __m512i scale_bf16(__m512i values, __m512 scale) {
  const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(values, 16));
  const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(values, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
  return to_bf16_pairs(_mm512_mul_ps(even, scale), _mm512_mul_ps(odd, scale));
}

}  // namespace qao::cpu
