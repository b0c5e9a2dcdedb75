// GGUF weight policy of bf16_gemm.h.
// A operands are dequantized weights, rounded to bfloat16, so C accumulates over all of K. A section has 256 columns.
//
// Codes of four bits: the 16 weights of a block of 32 columns are a table, in which `vpermw` looks up two nibbles of a
// byte as two words. It ignores all but the lowest five bits of an index, and the table is stored twice.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/amx/bf16_gemm.h"
#include "cpu/x86/avx512/gguf_unpack.h"

namespace qao::cpu {
namespace {

using namespace gguf;

// Whether codes have four bits.
template <Type kType>
constexpr bool kHasTable = kType == kQ4_0 || kType == kQ4_1 || kType == kIq4Nl || kType == kIq4Xs || kType == kQ4_K;

// The number of each nibble, before scale and minimum.
template <Type kType>
inline __m512 numbers_of_nibbles() {
  alignas(16) static constexpr uint8_t kPlain[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const __m128i codes = load128(kType == kIq4Nl || kType == kIq4Xs ? kIq4Codes : kPlain);
  return _mm512_sub_ps(_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(codes)), _mm512_set1_ps(Blocks<kType>::kOffset));
}

// Indices of 32 columns in the table of their block, number `block` of eight.
template <Type kType>
inline __m512i indices(const uint8_t* bytes, int block) {
  constexpr int kAt = Unpack<kType>::kNibblesAt;
  if constexpr (kType == kQ4_K) {
    const uint8_t* both = bytes + kAt + block / 2 * 32;
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(both)));
    return block % 2 == 0 ? words : _mm512_srli_epi16(words, 4);
  } else {
    const __m128i both = load128(bytes + block * (kType == kIq4Xs ? 16 : Blocks<kType>::kBytes) + kAt);
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(both));
    return _mm512_srlv_epi16(words, in_halves(0, 4));
  }
}

template <Type kType>
struct Gguf {
  static constexpr int kParts = 1;
  static constexpr bool kHalves = false, kSectioned = false, kScaledX = false;
  static constexpr int64_t kFewTiles = 2;

  template <int kN, bool kWholeK>
  static void expand(const Job& job, int64_t tile_n, int, const Section& section, uint16_t* out) {
    constexpr int64_t kRows = kN * kTileN;  // to the next data of a row's place
    const int64_t unit = section.tile * kTileK / kUnit;
    const int64_t next = kWholeK ? next_unit<kType>(job, unit, kRows) : kRows * job.row_bytes;
    for (int64_t r = 0; r < kTileN; ++r) {
      uint8_t padded[kUnitBytes<kType>];
      expand_row(unit_of_row<kType>(job, tile_n * kTileN + r, unit, next, padded), out + r * 32);
    }
  }

  static void add_section(const Job&, int64_t, int64_t, int64_t, const float*, float*) {}
  static __m512 row_scales(const Job&, int64_t, __mmask16) { return _mm512_set1_ps(1); }

 private:
  // One row of the A tiles of 256 columns.
  __attribute__((always_inline)) static void expand_row(const uint8_t* bytes, uint16_t* out) {
    Unit unit;
    Unpack<kType>::unpack(bytes, &unit);
    const SegmentScales<kType> scales(unit);
    const auto weights = [&](__m512 numbers, int segment) __attribute__((always_inline)) {
      if constexpr (!Blocks<kType>::kHasMinima) return _mm512_mul_ps(numbers, scales.scale(segment));
      return _mm512_fmsub_ps(numbers, scales.scale(segment), scales.minimum(segment));
    };
    const auto store = [&](int t, __m512i pairs) { _mm512_store_si512(out + t * kTileValues, pairs); };
    if constexpr (kHasTable<kType>) {
      const __m512 numbers = numbers_of_nibbles<kType>();
#pragma GCC unroll 8
      for (int t = 0; t < kUnitSegments / 2; ++t) {
        const __m512 table = weights(numbers, 2 * t);
        const __m512i twice = reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(table, table));
        store(t, _mm512_permutexvar_epi16(indices<kType>(bytes, t), twice));
      }
    } else {
      constexpr Segments kOrder = segment_order(kType);
      __m512 values[kUnitSegments];
#pragma GCC unroll 16
      for (int i = 0; i < kUnitSegments; ++i) {
        values[kOrder.of[i]] = weights(numbers_of<kType>(unit, i), kOrder.of[i]);
      }
#pragma GCC unroll 8
      for (int t = 0; t < kUnitSegments / 2; ++t) {
        store(t, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(values[2 * t + 1], values[2 * t])));
      }
    }
  }
};

}  // namespace

void amx::bf16_gguf_gemm(const Job& job, int64_t begin, int64_t end) {
  with_type(job.gguf_type, [&]<Type kType> { run_gemm<Gguf<kType>>(job, begin, end); });
}

}  // namespace qao::cpu
