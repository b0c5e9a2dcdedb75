// Unpacking of K-quants with AVX2: blocks of 256 columns with small integers as scales of their segments.
// W = scale() * (scales * (codes - offset)) - minima, codes in natural order. `static`: see numeric.h.
#pragma once

#include <utility>

#include "cpu/gguf_blocks.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu::gguf {
namespace {

template <Type kType>
constexpr bool kIsKQuant = kType == kQ2_K || kType == kQ3_K || kType == kQ4_K || kType == kQ5_K || kType == kQ6_K;

inline __m256i load256(const void* bytes) { return _mm256_loadu_si256(static_cast<const __m256i*>(bytes)); }
inline __m128i load128(const void* bytes) { return _mm_loadu_si128(static_cast<const __m128i*>(bytes)); }
inline void store256(void* bytes, __m256i value) { _mm256_storeu_si256(static_cast<__m256i*>(bytes), value); }

// Calls visit<0>() to visit<count - 1>().
template <int kCount, typename Visit>
__attribute__((always_inline)) inline void each(const Visit& visit) {
  [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
    (visit.template operator()<i>(), ...);
  }(std::make_integer_sequence<int, kCount>());
}

// Bytes shifted to the right, or to the left if kBits is negative, and masked.
template <int kBits>
inline __m256i bits_of(__m256i bytes, int mask) {
  if constexpr (kBits > 0) bytes = _mm256_srli_epi16(bytes, kBits);
  if constexpr (kBits < 0) bytes = _mm256_slli_epi16(bytes, -kBits);
  return _mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(mask)));
}

// 16-bit scales of segments 0, 2, 4 ... in the first half, those of segments 1, 3, 5 ... in the second.
struct SegmentScales {
  // Of columns [32 v, + 32): eight times that of their first segment, and of their second.
  template <int v>
  __m256i scales() const {
    return _mm256_shuffle_epi8(sixteen, _mm256_set1_epi16(static_cast<int16_t>(2 * v | (2 * v + 1) << 8)));
  }
  __m256i sixteen;
};
inline SegmentScales of_unsigned(__m128i bytes) {
  const __m128i even = _mm_and_si128(bytes, _mm_set1_epi16(0xFF));
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(even), _mm_srli_epi16(bytes, 8), 1)};
}
inline SegmentScales of_signed(__m128i bytes) {
  const __m128i even = _mm_srai_epi16(_mm_slli_epi16(bytes, 8), 8);
  return {_mm256_inserti128_si256(_mm256_castsi128_si256(even), _mm_srai_epi16(bytes, 8), 1)};
}
inline __m256 to_floats(__m128i bytes) { return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)); }

template <Type kType>
struct KQuant;

// Q4_K and Q5_K, nibbles at byte kAt.
template <int kAt>
struct SixBits : SegmentScales {
  explicit SixBits(const uint8_t* p) : p(p) {
    uint8_t values[16];
    split_scales(p + 4, values);
    const __m128i bytes = load128(values);
    sixteen = _mm256_broadcastsi128_si256(_mm_cvtepu8_epi16(bytes));
    minima = to_floats(_mm_srli_si128(bytes, 8));
  }
  template <int v>
  __m256i codes() const {
    return bits_of<v % 2 * 4>(load256(p + kAt + v / 2 * 32), 15);
  }
  float scale() const { return half(p); }
  __m256 less_minima(const float* x_sums, __m256 sum) const {
    // Sums of pairs of segments: 0 1 4 5 and 2 3 6 7 in the halves.
    const __m256 pairs = _mm256_hadd_ps(_mm256_loadu_ps(x_sums), _mm256_loadu_ps(x_sums + 8));
    const __m256 in_order = _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(pairs), 0b11011000));
    return _mm256_fnmadd_ps(_mm256_mul_ps(minima, _mm256_set1_ps(half(p + 2))), in_order, sum);
  }
  const uint8_t* p;
  __m256 minima;
};
template <>
struct KQuant<kQ4_K> : SixBits<16> {
  using SixBits::SixBits;
};
template <>
struct KQuant<kQ5_K> : SixBits<48> {
  explicit KQuant(const uint8_t* p) : SixBits(p), fifth(load256(p + 16)) {}
  template <int v>
  __m256i codes() const {
    return _mm256_or_si256(SixBits::codes<v>(), bits_of<v - 4>(fifth, 16));
  }
  __m256i fifth;
};

template <>
struct KQuant<kQ6_K> : SegmentScales {
  explicit KQuant(const uint8_t* p) : SegmentScales(of_signed(load128(p + 192))), p(p) {}
  template <int v>
  __m256i codes() const {
    constexpr int kHalf = v / 4, kRun = v % 4;
    const __m256i low = bits_of<kRun / 2 * 4>(load256(p + 64 * kHalf + kRun % 2 * 32), 15);
    return _mm256_or_si256(low, bits_of<2 * kRun - 4>(load256(p + 128 + 32 * kHalf), 0x30));
  }
  float scale() const { return half(p + 208); }
  const uint8_t* p;
};

template <>
struct KQuant<kQ2_K> : SegmentScales {
  explicit KQuant(const uint8_t* p) : SegmentScales(of_unsigned(_mm_and_si128(load128(p), _mm_set1_epi8(15)))), p(p) {}
  template <int v>
  __m256i codes() const {
    return bits_of<v % 4 * 2>(load256(p + 16 + v / 4 * 32), 3);
  }
  float scale() const { return half(p + 80); }
  __m256 less_minima(const float* x_sums, __m256 sum) const {
    const __m128i minima = _mm_and_si128(_mm_srli_epi16(load128(p), 4), _mm_set1_epi8(15));
    const __m256 first = _mm256_mul_ps(to_floats(minima), _mm256_loadu_ps(x_sums));
    const __m256 both = _mm256_fmadd_ps(to_floats(_mm_srli_si128(minima, 8)), _mm256_loadu_ps(x_sums + 8), first);
    return _mm256_fnmadd_ps(both, _mm256_set1_ps(half(p + 82)), sum);
  }
  const uint8_t* p;
};

template <>
struct KQuant<kQ3_K> : SegmentScales {
  explicit KQuant(const uint8_t* p) : SegmentScales(of_signed(six_bits(p + 96))), p(p), third(load256(p)) {}
  static __m128i six_bits(const uint8_t* bytes) {
    const __m128i both = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes));
    const __m128i low = _mm_and_si128(_mm_unpacklo_epi64(both, _mm_srli_epi16(both, 4)), _mm_set1_epi8(15));
    const __m128i bits =
        _mm_srlv_epi32(_mm_set1_epi32(static_cast<int>(load32(bytes + 8))), _mm_setr_epi32(0, 2, 4, 6));
    const __m128i upper = _mm_slli_epi16(_mm_and_si128(bits, _mm_set1_epi8(3)), 4);
    return _mm_sub_epi8(_mm_or_si128(low, upper), _mm_set1_epi8(32));
  }
  template <int v>
  __m256i codes() const {
    return _mm256_or_si256(bits_of<v % 4 * 2>(load256(p + 32 + v / 4 * 32), 3), bits_of<v - 2>(third, 4));
  }
  float scale() const { return half(p + 108); }
  const uint8_t* p;
  __m256i third;
};

}  // namespace
}  // namespace qao::cpu::gguf
