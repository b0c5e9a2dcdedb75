// Unpacking of GGUF blocks: 256 columns of a row of W as codes and scales. `static`: see numeric.h.
#pragma once

#include "cpu/gguf_blocks.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu::gguf {
namespace {

// Codes of 256 columns, and scales. kPairs: lanes 0..7 of `scales` are those of pairs of segments, and lanes 8..15
// their minima; otherwise scales and minima of the segments.
struct Unit {
  __m512i codes[4];
  __m512 scales, minima;
};

inline __m512i nibbles(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(15)); }
inline void split(__m512i bytes, __m512i* codes) {
  codes[0] = nibbles(bytes), codes[1] = nibbles(_mm512_srli_epi16(bytes, 4));
}
inline __m128i load128(const uint8_t* bytes) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)); }
inline float fp16(const uint8_t* bytes) { return _cvtsh_ss(load16(bytes)); }

// Four runs of 16 bytes.
template <int kStride>
inline __m512i load_runs(const uint8_t* bytes) {
  if constexpr (kStride == 16) return _mm512_loadu_si512(bytes);
  __m512i runs = _mm512_castsi128_si512(load128(bytes));
  runs = _mm512_inserti32x4(runs, load128(bytes + kStride), 1);
  runs = _mm512_inserti32x4(runs, load128(bytes + 2 * kStride), 2);
  return _mm512_inserti32x4(runs, load128(bytes + 3 * kStride), 3);
}

// Eight float16 numbers, kStride bytes apart.
template <int kStride>
inline __m256 load_halves8(const uint8_t* bytes) {
  const auto at = [&](int i) { return static_cast<int16_t>(load16(bytes + i * kStride)); };
  return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}
inline __m512 join(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

template <Type kType>
struct Unpack;

// Eight blocks of 32 columns with nibbles at byte kAt.
template <Type kType, int kAt>
struct Nibbles {
  static constexpr int kScales = 2;
  static constexpr bool kPairs = true;
  static constexpr int kBytes = Blocks<kType>::kBytes;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    split(load_runs<kBytes>(p + kAt), unit->codes);
    split(load_runs<kBytes>(p + 4 * kBytes + kAt), unit->codes + 2);
    const __m256 d = load_halves8<kBytes>(p);
    __m256 minima = _mm256_setzero_ps();
    if constexpr (Blocks<kType>::kHasMinima) {
      minima = _mm256_xor_ps(_mm256_set1_ps(-0.0f), load_halves8<kBytes>(p + 2));
    }
    unit->scales = join(d, minima);
  }
};
template <>
struct Unpack<kQ4_0> : Nibbles<kQ4_0, 2> {};
template <>
struct Unpack<kQ4_1> : Nibbles<kQ4_1, 4> {};

inline void to_iq4(Unit* unit) {
  const __m512i table = _mm512_broadcast_i32x4(load128(kIq4Codes));
  for (__m512i& codes : unit->codes) codes = _mm512_shuffle_epi8(table, codes);
}
template <>
struct Unpack<kIq4Nl> : Nibbles<kIq4Nl, 2> {
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    Nibbles::unpack(p, unit);
    to_iq4(unit);
  }
};

// The same with fifth bits at byte kHigh.
template <Type kType, int kAt, int kHigh>
struct FiveBits : Nibbles<kType, kAt> {
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    Nibbles<kType, kAt>::unpack(p, unit);
    for (int half = 0; half < 2; ++half) {
      uint64_t low = 0, high = 0;
      for (int i = 0; i < 4; ++i) {
        const uint64_t bits = load32(p + (4 * half + i) * Blocks<kType>::kBytes + kHigh);
        low |= (bits & 0xFFFF) << 16 * i, high |= bits >> 16 << 16 * i;
      }
      __m512i* codes = unit->codes + 2 * half;
      codes[0] = _mm512_mask_add_epi8(codes[0], low, codes[0], _mm512_set1_epi8(16));
      codes[1] = _mm512_mask_add_epi8(codes[1], high, codes[1], _mm512_set1_epi8(16));
    }
  }
};
template <>
struct Unpack<kQ5_0> : FiveBits<kQ5_0, 6, 2> {};
template <>
struct Unpack<kQ5_1> : FiveBits<kQ5_1, 8, 4> {};

template <>
struct Unpack<kQ8_0> {
  static constexpr int kScales = 4;
  static constexpr bool kPairs = true;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    for (int v = 0; v < 4; ++v) {
      const __m512i bytes = load_halves(p + 2 * v * 34 + 2, p + (2 * v + 1) * 34 + 2);
      unit->codes[v] = _mm512_xor_si512(bytes, _mm512_set1_epi8(static_cast<char>(0x80)));
    }
    unit->scales = _mm512_zextps256_ps512(load_halves8<34>(p));
  }
};

// Q4_K and Q5_K, nibbles at byte kAt.
template <int kAt>
struct SixBits {
  static constexpr int kScales = 2;
  static constexpr bool kPairs = true;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    const __m512i a = _mm512_loadu_si512(p + kAt), b = _mm512_loadu_si512(p + kAt + 64);
    split(_mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 4, 5, 8, 9, 12, 13), b), unit->codes);
    const __m512i second = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(2, 3, 6, 7, 10, 11, 14, 15), b);
    __m512i codes[2];
    split(second, codes);
    unit->codes[3] = codes[1], unit->codes[2] = unit->codes[1], unit->codes[1] = codes[0];
    uint8_t values[16];
    split_scales(p + 4, values);
    const __m512 six = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load128(values)));
    const __m512 d = _mm512_set1_ps(fp16(p)), least = _mm512_set1_ps(fp16(p + 2));
    unit->scales = _mm512_mul_ps(six, _mm512_mask_blend_ps(0xFF00, d, least));
  }
};
template <>
struct Unpack<kQ4_K> : SixBits<16> {};
template <>
struct Unpack<kQ5_K> : SixBits<48> {
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    SixBits::unpack(p, unit);
    const __m512i bits = _mm512_setr_epi32(0x01010101, 0x01010101, 0x01010101, 0x01010101, 0x04040404, 0x04040404,
                                           0x04040404, 0x04040404, 0x10101010, 0x10101010, 0x10101010, 0x10101010,
                                           0x40404040, 0x40404040, 0x40404040, 0x40404040);
    for (int v = 0; v < 4; ++v) {
      const __m512i high = _mm512_broadcast_i32x4(load128(p + 16 + v % 2 * 16));
      const __mmask64 set = _mm512_test_epi8_mask(high, v < 2 ? bits : _mm512_add_epi8(bits, bits));
      unit->codes[v] = _mm512_mask_add_epi8(unit->codes[v], set, unit->codes[v], _mm512_set1_epi8(16));
    }
  }
};

inline __m512i in_halves(int low, int high) {
  return _mm512_inserti64x4(_mm512_set1_epi16(static_cast<int16_t>(low)), _mm256_set1_epi16(static_cast<int16_t>(high)),
                            1);
}
inline __m512i load_twice(const uint8_t* bytes) {
  return _mm512_broadcast_i64x4(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)));
}

template <>
struct Unpack<kQ6_K> {
  static constexpr int kScales = 4;
  static constexpr bool kPairs = false;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    const __m512i upper = _mm512_set1_epi8(0x30);
    for (int half = 0; half < 2; ++half) {
      __m512i* codes = unit->codes + 2 * half;
      split(_mm512_loadu_si512(p + 64 * half), codes);
      const __m512i high = load_twice(p + 128 + 32 * half);
      codes[0] = _mm512_or_si512(codes[0], _mm512_and_si512(_mm512_sllv_epi16(high, in_halves(4, 2)), upper));
      codes[1] = _mm512_or_si512(codes[1], _mm512_and_si512(_mm512_srlv_epi16(high, in_halves(0, 2)), upper));
    }
    unit->scales =
        _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load128(p + 192))), _mm512_set1_ps(fp16(p + 208)));
  }
};
template <>
struct Unpack<kQ2_K> {
  static constexpr int kScales = 4;
  static constexpr bool kPairs = false;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    const __m512i bytes = _mm512_loadu_si512(p + 16);
    for (int v = 0; v < 4; ++v) {
      unit->codes[v] = _mm512_and_si512(_mm512_srli_epi16(bytes, 2 * v), _mm512_set1_epi8(3));
    }
    const __m512i both = _mm512_cvtepu8_epi32(load128(p));
    const __m512i scales = _mm512_and_si512(both, _mm512_set1_epi32(15)), minima = _mm512_srli_epi32(both, 4);
    unit->scales = _mm512_mul_ps(_mm512_cvtepi32_ps(scales), _mm512_set1_ps(fp16(p + 80)));
    unit->minima = _mm512_mul_ps(_mm512_cvtepi32_ps(minima), _mm512_set1_ps(fp16(p + 82)));
  }
};
template <Type kType>
inline __m512 load_scales(const uint8_t* p) {
  alignas(64) float scales[kUnitSegments];
  Blocks<kType>::scales(p, scales, nullptr);
  return _mm512_load_ps(scales);
}
template <>
struct Unpack<kQ3_K> {
  static constexpr int kScales = 4;
  static constexpr bool kPairs = false;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    const __m512i bytes = _mm512_loadu_si512(p + 32), high = load_twice(p);
    for (int v = 0; v < 4; ++v) {
      const __m512i low = _mm512_and_si512(_mm512_srli_epi16(bytes, 2 * v), _mm512_set1_epi8(3));
      const __mmask64 set = _mm512_test_epi8_mask(high, in_halves(0x0101 << v, 0x1010 << v));
      unit->codes[v] = _mm512_mask_add_epi8(low, set, low, _mm512_set1_epi8(4));
    }
    unit->scales = load_scales<kQ3_K>(p);
  }
};
template <>
struct Unpack<kIq4Xs> {
  static constexpr int kScales = 2;
  static constexpr bool kPairs = false;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    split(_mm512_loadu_si512(p + 8), unit->codes);
    split(_mm512_loadu_si512(p + 72), unit->codes + 2);
    to_iq4(unit);
    unit->scales = load_scales<kIq4Xs>(p);
  }
};

}  // namespace
}  // namespace qao::cpu::gguf
