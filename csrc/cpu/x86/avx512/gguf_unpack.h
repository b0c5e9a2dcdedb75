// Unpacking of GGUF blocks: 256 columns of a row of W as codes and scales. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/gguf_blocks.h"
#include "cpu/parallel.h"
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

// Eight float16 numbers, kStride bytes apart.
template <int kStride>
inline __m256 load_halves8(const uint8_t* bytes) {
  const auto at = [&](int i) { return static_cast<int16_t>(load16(bytes + i * kStride)); };
  return _mm256_cvtph_ps(_mm_setr_epi16(at(0), at(1), at(2), at(3), at(4), at(5), at(6), at(7)));
}
inline __m512 join(__m256 low, __m256 high) { return _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1); }

template <Type kType>
struct Unpack;

// The bytes of 256 columns of which the first `left` exist, followed by zeros in `padded`.
template <Type kType>
inline const uint8_t* whole_unit(const uint8_t* bytes, int64_t left, uint8_t (&padded)[kUnitBytes<kType>]) {
  if (left >= kUnitBytes<kType>) [[likely]]
    return bytes;
  std::memset(padded, 0, sizeof(padded));
  std::memcpy(padded, bytes, static_cast<size_t>(left));
  return padded;
}

// The bytes of columns [256 unit, + 256) of row n of W. Zeros past K. Rows past N repeat the last one; their results
// are not written. Prefetches the bytes `ahead` of them.
template <Type kType>
__attribute__((always_inline)) inline const uint8_t* unit_of_row(const Job& job, int64_t n, int64_t unit, int64_t ahead,
                                                                 uint8_t (&padded)[kUnitBytes<kType>]) {
  constexpr int64_t kBytes = kUnitBytes<kType>;
  const uint8_t* bytes = job.weight + least(n, job.n - 1) * job.row_bytes + unit * kBytes;
  for (int64_t at = 0; at < kBytes; at += 64) _mm_prefetch(bytes + ahead + at, _MM_HINT_T1);
  return whole_unit<kType>(bytes, job.row_bytes - unit * kBytes, padded);
}
// Bytes from there to the same row's next columns, or behind the last to the first of the row `rows` further.
template <Type kType>
inline int64_t next_unit(const Job& job, int64_t unit, int64_t rows) {
  const int64_t at = unit * kUnitBytes<kType>;
  return job.row_bytes - at > kUnitBytes<kType> ? kUnitBytes<kType> : rows * job.row_bytes - at;
}

// 32 words of 8 blocks of kBytes bytes, as indices into two of their three vectors: bytes 0, 64 and the last 64.
template <int kBytes>
struct Words {
  static constexpr int kLast = 8 * kBytes - 64;
  alignas(64) uint16_t at[32] = {};

  // Sixteen bytes from byte kAt of blocks kFirst to kFirst + 3, in the first and second, or second and third vector.
  static constexpr Words runs(int first, int begin) {
    Words words;
    for (int i = 0; i < 32; ++i) {
      const int byte = (first + i / 8) * kBytes + begin + i % 8 * 2;
      words.at[i] = static_cast<uint16_t>((first == 0 ? byte : byte < 128 ? byte - 64 : byte - kLast + 64) / 2);
    }
    return words;
  }
  // Word 0 of the blocks and word 1 of the blocks, eight each: in the first and second vector, or in the third.
  static constexpr Words numbers(bool third) {
    Words words;
    for (int i = 0; i < 16; ++i) {
      const int byte = i % 8 * kBytes + i / 8 * 2;
      words.at[i] = static_cast<uint16_t>(third ? (byte < kLast ? 0 : byte - kLast) / 2 : byte / 2 % 64);
    }
    return words;
  }
  // Which of `numbers` are in the third vector.
  static constexpr uint32_t beyond() {
    uint32_t lanes = 0;
    for (int i = 0; i < 16; ++i) lanes |= i % 8 * kBytes + i / 8 * 2 >= 128 ? 1u << i : 0;
    return lanes;
  }
  __m512i load() const { return _mm512_load_si512(at); }
};

// Eight blocks of 32 columns with nibbles at byte kAt.
template <Type kType, int kAt>
struct Nibbles {
  static constexpr int kScales = 2;
  static constexpr bool kPairs = true;
  static constexpr int kNibblesAt = kAt, kBytes = Blocks<kType>::kBytes;
  using Of = Words<kBytes>;
  static constexpr Of kFirst = Of::runs(0, kAt), kSecond = Of::runs(4, kAt);
  static constexpr Of kNumbers = Of::numbers(false), kMore = Of::numbers(true);

  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    const __m512i a = _mm512_loadu_si512(p), b = _mm512_loadu_si512(p + 64), c = _mm512_loadu_si512(p + Of::kLast);
    split(_mm512_permutex2var_epi16(a, kFirst.load(), b), unit->codes);
    split(_mm512_permutex2var_epi16(b, kSecond.load(), c), unit->codes + 2);
    __m512i numbers = _mm512_permutex2var_epi16(a, kNumbers.load(), b);
    numbers = _mm512_mask_permutexvar_epi16(numbers, Of::beyond(), kMore.load(), c);
    constexpr __mmask16 kMinima = 0xFF00;
    unit->scales = _mm512_cvtph_ps(_mm512_castsi512_si256(numbers));
    if constexpr (Blocks<kType>::kHasMinima) {
      unit->scales = _mm512_mask_sub_ps(unit->scales, kMinima, _mm512_set1_ps(-0.0f), unit->scales);
    }
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
  static constexpr int kScales = 2, kNibblesAt = kAt;
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
    // In registers: a load from two stores would wait for both.
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 96)), four = _mm_set1_epi8(15);
    const __m128i low = _mm_and_si128(_mm_unpacklo_epi64(both, _mm_srli_epi16(both, 4)), four);
    const __m128i bits = _mm_srlv_epi32(_mm_set1_epi32(static_cast<int>(load32(p + 104))), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i upper = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi8(3)), 4);
    const __m512i six = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_or_si128(low, upper)), _mm512_set1_epi32(32));
    unit->scales = _mm512_mul_ps(_mm512_cvtepi32_ps(six), _mm512_set1_ps(fp16(p + 108)));
  }
};
template <>
struct Unpack<kIq4Xs> {
  static constexpr int kScales = 2, kNibblesAt = 8;
  static constexpr bool kPairs = true;
  __attribute__((always_inline)) static void unpack(const uint8_t* p, Unit* unit) {
    split(_mm512_loadu_si512(p + kNibblesAt), unit->codes);
    split(_mm512_loadu_si512(p + kNibblesAt + 64), unit->codes + 2);
    to_iq4(unit);
    const __m256i number = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const auto bits = [&](uint32_t word, int width) {  // eight numbers
      const __m256i shifted = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int>(word)),
                                                _mm256_mullo_epi32(number, _mm256_set1_epi32(width)));
      return _mm256_and_si256(shifted, _mm256_set1_epi32((1 << width) - 1));
    };
    const __m256i six = _mm256_or_si256(bits(load32(p + 4), 4), _mm256_slli_epi32(bits(load16(p + 2), 2), 4));
    const __m256 scales = _mm256_cvtepi32_ps(_mm256_sub_epi32(six, _mm256_set1_epi32(32)));
    unit->scales = _mm512_zextps256_ps512(_mm256_mul_ps(scales, _mm256_set1_ps(fp16(p))));
  }
};

// Scales and minima by segment.
template <Type kType>
struct SegmentScales {
  using U = Unpack<kType>;
  __attribute__((always_inline)) explicit SegmentScales(const Unit& unit) {
    _mm512_store_ps(scales, unit.scales);
    if constexpr (Blocks<kType>::kHasMinima) {
      _mm512_store_ps(minima, U::kPairs ? _mm512_shuffle_f32x4(unit.scales, unit.scales, 0xEE) : unit.minima);
    }
  }
  __m512 scale(int segment) const { return _mm512_set1_ps(scales[U::kPairs ? segment / 2 : segment]); }
  __m512 minimum(int segment) const { return _mm512_set1_ps(minima[U::kPairs ? segment / 2 : segment]); }

  alignas(64) float scales[kUnitSegments], minima[kUnitSegments];
};

// Codes of segment_order().of[i] minus the offset.
template <Type kType>
__attribute__((always_inline)) inline __m512 numbers_of(const Unit& unit, int i) {
  const __m512i codes = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(unit.codes[i / 4], i % 4));
  return _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(Blocks<kType>::kOffset)));
}

}  // namespace
}  // namespace qao::cpu::gguf
