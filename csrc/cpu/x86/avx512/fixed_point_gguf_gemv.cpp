// GGUF W by x in fixed point with VNNI, any block type and any number of rows of x.
// 256 columns of a row of W become four vectors of unsigned codes in the order of segment_order(), which needs hardly
// any shuffles, since x was packed in that order. Vectors of the same groups are added as integers before their scale:
//   y += x_scale * sum over groups of scale * (sum(code * x) - offset * sum(x)) - minimum * sum(x).
// Offsets come off the exact integer sums. Four rows of W are read at a time, as four streams.
#include <immintrin.h>

#include "cpu/gguf_blocks.h"
#include "cpu/mm_kernels.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

using namespace gguf;

constexpr int kRows = 4;  // of W at a time
constexpr int kPlanes = 2 * kTileColumns;

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
      minima = _mm256_sub_ps(minima, load_halves8<kBytes>(p + 2));
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

// Lanes of Unit::scales for chain `chain`: lane l multiplies segment l / 4 of its vectors.
template <Type kType>
inline __m512i lanes_of(int chain) {
  using U = Unpack<kType>;
  constexpr Segments kOrder = segment_order(kType);
  alignas(64) int lanes[16];
  for (int l = 0; l < 16; ++l) {
    const int segment = kOrder.of[chain * (16 / U::kScales) + l / 4];
    lanes[l] = U::kPairs ? segment / 2 : segment;
  }
  return _mm512_load_si512(lanes);
}

// Integer sums of a chain's vectors times a word of x: 256 * high + low.
template <int kVectors>
__attribute__((always_inline)) inline __m512i dot(const __m512i* codes, const int8_t* x) {
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) sum = _mm512_dpbusd_epi32(sum, codes[v], _mm512_load_si512(x + v * kPlanes));
  sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    sum = _mm512_dpbusd_epi32(sum, codes[v], _mm512_load_si512(x + v * kPlanes + kTileColumns));
  }
  return sum;
}

// Rows n .. n + 3 of W by rows m .. m + kM of x.
template <Type kType, int kM>
void run_rows(const Job& job, int64_t n, int64_t m) {
  using B = Blocks<kType>;
  using U = Unpack<kType>;
  constexpr int kVectors = 4 / U::kScales;
  constexpr int64_t kUnitBytes = kUnit / B::kColumns * B::kBytes;
  __m512i lanes[U::kScales];
  for (int c = 0; c < U::kScales; ++c) lanes[c] = lanes_of<kType>(c);
  const __m512i of_minima = _mm512_setr_epi32(8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
  __m512 sums[kRows][kM];
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) sums[r][i] = _mm512_setzero_ps();
  }
  const uint8_t* rows[kRows];
  for (int r = 0; r < kRows; ++r) rows[r] = job.weight + least(n + r, job.n - 1) * job.row_bytes;
  uint8_t padded[kRows][kUnitBytes];

  for (int64_t chunk = 0; chunk < job.chunks; ++chunk) {
    const uint8_t* at[kRows];
    const bool whole = (chunk + 1) * kUnitBytes <= job.row_bytes;
    for (int r = 0; r < kRows; ++r) {
      at[r] = rows[r] + chunk * kUnitBytes;
      if (!whole) [[unlikely]] {
        std::memset(padded[r], 0, kUnitBytes);
        std::memcpy(padded[r], at[r], static_cast<size_t>(job.row_bytes - chunk * kUnitBytes));
        at[r] = padded[r];
      }
      for (int64_t byte = 0; byte < kUnitBytes; byte += 64) {
        _mm_prefetch(reinterpret_cast<const char*>(at[r] + kRows * job.row_bytes + byte), _MM_HINT_T1);
      }
    }
#pragma GCC unroll 1
    for (int word = 0; word < kMaxWords; ++word) {
      bool any = false;
      for (int i = 0; i < kM; ++i) any |= word < job.chunk_words[(m + i) * job.chunks + chunk];
      if (!any) break;
      __m512 x_scale[kM];
      const int8_t* x[kM];
      __m512i offsets[kM][U::kScales];
#pragma GCC unroll 4
      for (int i = 0; i < kM; ++i) {
        // Where a row has fewer words, its factor is 0 for any bytes of word 0.
        const bool has = word < job.chunk_words[(m + i) * job.chunks + chunk];
        const float unit = word == 0 ? 1.0f : word == 1 ? 0x1p-15f : 0x1p-30f;
        x_scale[i] = _mm512_set1_ps(has ? job.chunk_scales[(m + i) * job.chunks + chunk] * unit : 0.0f);
        x[i] = job.fixed_point[has ? word : 0] + ((m + i) * job.chunks + chunk) * 4 * kPlanes;
        if constexpr (B::kOffset != 0) {
          const __m512i offset = _mm512_set1_epi8(static_cast<char>(B::kOffset));
          const __m512i same[2] = {offset, offset};
#pragma GCC unroll 4
          for (int c = 0; c < U::kScales; ++c) offsets[i][c] = dot<kVectors>(same, x[i] + c * kVectors * kPlanes);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Unit unit;
        U::unpack(at[r], &unit);
        __m512 scale[U::kScales];
#pragma GCC unroll 4
        for (int c = 0; c < U::kScales; ++c) scale[c] = _mm512_permutexvar_ps(lanes[c], unit.scales);
#pragma GCC unroll 4
        for (int i = 0; i < kM; ++i) {
          __m512 sum;
#pragma GCC unroll 4
          for (int c = 0; c < U::kScales; ++c) {
            __m512i products = dot<kVectors>(unit.codes + c * kVectors, x[i] + c * kVectors * kPlanes);
            if constexpr (B::kOffset != 0) products = _mm512_sub_epi32(products, offsets[i][c]);
            const __m512 part = _mm512_cvtepi32_ps(products);
            sum = c == 0 ? _mm512_mul_ps(part, scale[c]) : _mm512_fmadd_ps(part, scale[c], sum);
          }
          sums[r][i] = _mm512_fmadd_ps(sum, x_scale[i], sums[r][i]);
          if (B::kHasMinima && word == 0) {
            const __m512 minima = U::kPairs ? _mm512_permutexvar_ps(of_minima, unit.scales) : unit.minima;
            const float* x_sums = job.segment_sums + ((m + i) * job.chunks + chunk) * kUnitSegments;
            sums[r][i] = _mm512_fnmadd_ps(minima, _mm512_load_ps(x_sums), sums[r][i]);
          }
        }
      }
    }
  }
  for (int r = 0; r < kRows && n + r < job.n; ++r) {
    const float bias = job.bias != nullptr ? load(job.bias, n + r, job.bias_dtype) : 0.0f;
    for (int i = 0; i < kM; ++i) {
      store(job.y, (m + i) * job.n + n + r, job.y_dtype, _mm512_reduce_add_ps(sums[r][i]) + bias);
    }
  }
}

}  // namespace

void avx512::fixed_point_gguf_gemv(const Job& job, int64_t begin, int64_t end) {
  with_type(job.gguf_type, [&]<Type kType> {
    for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); n += kRows) {
      int64_t m = 0;
      for (; m + 4 <= job.m; m += 4) run_rows<kType, 4>(job, n, m);
      for (; m < job.m; ++m) run_rows<kType, 1>(job, n, m);
    }
  });
}

}  // namespace qao::cpu
