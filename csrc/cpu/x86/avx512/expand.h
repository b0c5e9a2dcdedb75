// Exact conversion of bytes of W to bfloat16: 64 columns in order. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {

// The two bytes of a bfloat16, indexed by seven bits without the sign.
struct ByteTable {
  alignas(64) uint8_t low[128], high[128];
};
static constexpr ByteTable kFp8Table = [] {  // e4m3
  ByteTable table = {};
  for (int i = 0; i < 128; ++i) {
    int bits = (i << 4) + (120 << 7);  // the exponent moves from bias 7 to bias 127
    if (i < 8) {                       // subnormal: i * 2^-9
      const int log2 = i < 2 ? 0 : i < 4 ? 1 : 2;
      bits = i == 0 ? 0 : (118 + log2) << 7 | ((i << (7 - log2)) & 0x7F);
    }
    if (i == 127) bits = 0x7FC0;  // NaN
    table.low[i] = static_cast<uint8_t>(bits & 0xFF);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}();

static constexpr ByteTable kInt8Table = [] {  // magnitudes of int8
  ByteTable table = {};
  for (int i = 1; i < 128; ++i) {
    int log2 = 0;
    while (i >> log2 > 1) ++log2;
    const int bits = (127 + log2) << 7 | (i << (7 - log2) & 0x7F);
    table.low[i] = static_cast<uint8_t>(bits & 0xFF);
    table.high[i] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}();

__attribute__((always_inline)) static inline __m512i look_up_byte(const uint8_t (&table)[128], __m512i index) {
  return _mm512_permutex2var_epi8(_mm512_load_si512(table), index, _mm512_load_si512(table + 64));
}

// Combines the bytes of bfloat16, with the signs of `bytes` added to `high`: bytes 8 i .. 8 i + 7 of each 128-bit lane.
__attribute__((always_inline)) static inline void with_signs(__m512i low, __m512i high, __m512i bytes,
                                                             __m512i (&out)[2]) {
  const __m512i signed_high = _mm512_ternarylogic_epi32(high, bytes, _mm512_set1_epi8(-128), 0xF8);  // | (bytes & ...)
  out[0] = _mm512_unpacklo_epi8(low, signed_high);
  out[1] = _mm512_unpackhi_epi8(low, signed_high);
}
__attribute__((always_inline)) static inline void expand_fp8_halves(__m512i bytes, __m512i (&out)[2]) {
  with_signs(look_up_byte(kFp8Table.low, bytes), look_up_byte(kFp8Table.high, bytes), bytes, out);
}
__attribute__((always_inline)) static inline void expand_int8_halves(__m512i bytes, __m512i (&out)[2]) {
  const __m512i magnitude = _mm512_abs_epi8(bytes);  // -128 stays, and the table has 0 for it
  const __mmask64 lowest = _mm512_cmpeq_epi8_mask(bytes, _mm512_set1_epi8(-128));
  const __m512i high = _mm512_mask_mov_epi8(look_up_byte(kInt8Table.high, magnitude), lowest, _mm512_set1_epi8(0x43));
  with_signs(look_up_byte(kInt8Table.low, magnitude), high, bytes, out);
}

// out[0]: columns 0..31, out[1]: columns 32..63.
__attribute__((always_inline)) static inline void expand_fp8(__m512i bytes, __m512i (&out)[2]) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  expand_fp8_halves(_mm512_permutexvar_epi64(order, bytes), out);
}

// Converts 16 columns of int8 to float32.
__attribute__((always_inline)) static inline __m512 widen_int8(__m128i bytes) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes));
}

// Converts byte i of each word, int8, to float32.
__attribute__((always_inline)) static inline __m512 widen_byte(__m512i words, unsigned i) {
  return _mm512_cvtepi32_ps(_mm512_srai_epi32(i == 3 ? words : _mm512_slli_epi32(words, 24 - 8 * i), 24));
}

}  // namespace qao::cpu
