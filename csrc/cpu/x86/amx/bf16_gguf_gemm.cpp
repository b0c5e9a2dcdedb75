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

// Offset of the nibbles in eight blocks of 32 columns, and their distance; 0: no nibbles in that order.
template <Type kType>
constexpr int kNibblesAt = kType == kQ4_0 || kType == kIq4Nl ? 2
                           : kType == kQ4_1                  ? 4
                           : kType == kIq4Xs                 ? 8
                                                             : 0;
template <Type kType>
constexpr int kNibblesStride = kType == kIq4Xs ? 16 : Blocks<kType>::kBytes;
template <Type kType>
constexpr bool kHasTable = kNibblesAt<kType> > 0 || kType == kQ4_K;

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
  if constexpr (kType == kQ4_K) {
    const uint8_t* both = bytes + 16 + block / 2 * 32;
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(both)));
    return block % 2 == 0 ? words : _mm512_srli_epi16(words, 4);
  } else {
    const __m128i both = load128(bytes + block * kNibblesStride<kType> + kNibblesAt<kType>);
    const __m512i words = _mm512_cvtepu8_epi16(_mm256_broadcastsi128_si256(both));
    return _mm512_srlv_epi16(words, in_halves(0, 4));
  }
}

template <Type kType>
struct Gguf {
  static constexpr int kParts = 1;
  static constexpr bool kHalves = false, kSectioned = false, kScaledX = false;
  static constexpr int64_t kFewTiles = 2;

  // Rows past N repeat the last one; their results are not written. Zeros past K.
  template <int kN, bool kWholeK>
  static void expand(const Job& job, int64_t tile_n, int, const Section& section, uint16_t* out) {
    using B = Blocks<kType>;
    constexpr int64_t kBytes = kUnit / B::kColumns * B::kBytes;
    const int64_t unit = section.tile * kTileK / kUnit, left = job.row_bytes - unit * kBytes;
    const int64_t next = kWholeK && left > kBytes ? kBytes : kN * kTileN * job.row_bytes;
    for (int64_t r = 0; r < kTileN; ++r) {
      const uint8_t* bytes = job.weight + least(tile_n * kTileN + r, job.n - 1) * job.row_bytes + unit * kBytes;
      for (int64_t at = 0; at < kBytes; at += 64) _mm_prefetch(bytes + next + at, _MM_HINT_T1);
      uint8_t padded[kBytes];
      if (left < kBytes) [[unlikely]] {
        std::memset(padded, 0, kBytes);
        std::memcpy(padded, bytes, static_cast<size_t>(left));
        bytes = padded;
      }
      expand_row(bytes, out + r * 32);
    }
  }

  static void add_section(const Job&, int64_t, int64_t, int64_t, const float*, float*) {}
  static __m512 row_scales(const Job&, int64_t, __mmask16) { return _mm512_set1_ps(1); }

 private:
  // One row of the A tiles of 256 columns.
  __attribute__((always_inline)) static void expand_row(const uint8_t* bytes, uint16_t* out) {
    using U = Unpack<kType>;
    constexpr bool kHasMinima = Blocks<kType>::kHasMinima;
    Unit unit;
    U::unpack(bytes, &unit);
    // By segment, or by pair of segments.
    alignas(64) float scales[kUnitSegments], minima[kUnitSegments];
    _mm512_store_ps(scales, unit.scales);
    if constexpr (kHasMinima) {
      _mm512_store_ps(minima, U::kPairs ? _mm512_shuffle_f32x4(unit.scales, unit.scales, 0xEE) : unit.minima);
    }
    const auto weights = [&](__m512 numbers, int segment) __attribute__((always_inline)) {
      const int at = U::kPairs ? segment / 2 : segment;
      if constexpr (!kHasMinima) return _mm512_mul_ps(numbers, _mm512_set1_ps(scales[at]));
      return _mm512_fmsub_ps(numbers, _mm512_set1_ps(scales[at]), _mm512_set1_ps(minima[at]));
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
        const __m512i codes = _mm512_cvtepu8_epi32(_mm512_extracti32x4_epi32(unit.codes[i / 4], i % 4));
        const __m512 numbers = _mm512_cvtepi32_ps(_mm512_sub_epi32(codes, _mm512_set1_epi32(Blocks<kType>::kOffset)));
        values[kOrder.of[i]] = weights(numbers, kOrder.of[i]);
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
