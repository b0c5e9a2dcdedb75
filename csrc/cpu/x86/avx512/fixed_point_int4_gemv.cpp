// 4-bit W by a few rows of x in fixed point with VNNI.
// It multiplies W's unsigned nibbles, unshifted, by the signed bytes of x. One 64-byte load holds two rows of W over 64
// k: `& 0x0F` is row g, `& 0xF0` is 16 times row g + 8. For fp4, `vpermb` converts codes to bytes 0..24: twice the
// value, plus 12.
//
// Per chunk and row, with exact integer sums:  y += scale * x_scale * (sum(q * x) - zero * sum(x)).
// Lanes stay separate until the end of the row: lane j holds columns 4 j .. 4 j + 3 in tile_column()'s order.
#include <type_traits>

#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/fp4.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/simd.h"
#include "cpu/x86/fixed_point_gemv.h"
#include "cpu/x86/weight_stream.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

// A value per row of W for a chunk. With groups of 32 the lanes of a row belong to two groups, in the pattern 0 0 1 1,
// with groups of 16 to four. Then four values are stored, otherwise one.
template <int kGroups>
struct RowValues {
  static constexpr int kStored = kGroups == 1 ? 1 : 4;
  alignas(64) float values[kTileN * kStored];

  void set(__m512 group0, __m512 group1) {
    if constexpr (kGroups == 2) {
      for (int i = 0; i < 4; ++i) {
        const __m512i row = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 16, 16, 1, 1, 17, 17, 2, 2, 18, 18, 3, 3, 19, 19),
                                             _mm512_set1_epi32(4 * i));
        _mm512_store_ps(values + 16 * i, _mm512_permutex2var_ps(group0, row, group1));
      }
    } else {
      _mm512_store_ps(values, group0);
    }
  }
  void set(const __m512 (&groups)[4]) {
    const __m512 low01 = _mm512_unpacklo_ps(groups[0], groups[1]), high01 = _mm512_unpackhi_ps(groups[0], groups[1]);
    const __m512 low23 = _mm512_unpacklo_ps(groups[2], groups[3]), high23 = _mm512_unpackhi_ps(groups[2], groups[3]);
    const auto join = [](__m512 a, __m512 b, auto select) {
      return _mm512_castpd_ps(_mm512_shuffle_pd(_mm512_castps_pd(a), _mm512_castps_pd(b), decltype(select)::value));
    };
    using First = std::integral_constant<int, 0x00>;
    using Second = std::integral_constant<int, 0xFF>;
    // Lane j of rows[r] is row 4 j + r.
    const __m512 rows[4] = {join(low01, low23, First()), join(low01, low23, Second()), join(high01, high23, First()),
                            join(high01, high23, Second())};
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      _mm_store_ps(values + 4 * r, _mm512_castps512_ps128(rows[r]));
      _mm_store_ps(values + 4 * (4 + r), _mm512_extractf32x4_ps(rows[r], 1));
      _mm_store_ps(values + 4 * (8 + r), _mm512_extractf32x4_ps(rows[r], 2));
      _mm_store_ps(values + 4 * (12 + r), _mm512_extractf32x4_ps(rows[r], 3));
    }
  }
  __m512 operator[](int row) const {
    if constexpr (kGroups > 1) return _mm512_broadcast_f32x4(_mm_load_ps(values + 4 * row));
    return _mm512_set1_ps(values[row]);
  }
};

// Operand bytes of W, of rows g and g + 8, and the factors of a chunk.
template <int kWordsOfX, int kGroupsOfTile>
struct Int4 {
  static constexpr int kWords = kWordsOfX, kGroups = kGroupsOfTile;
  struct Factors {
    // Of each word: scale * x_scale, 1/16 of it for rows 8..15, 2^-15 of it for the second word.
    RowValues<kGroups> scale[kWords];
    RowValues<kGroups> zero;  // 16 times the zero point for rows 8..15
    __m512 less_zero(int row, __m512 x_sum, __m512 sum) const { return _mm512_fnmadd_ps(zero[row], x_sum, sum); }
  };
  static __m512 of_x_sum(__m512 x_sum) { return x_sum; }
  static __m512i low(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F)); }
  static __m512i high(__m512i bytes) { return _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0))); }
};

template <int kWordsOfX, int kGroupsOfTile>
struct Fp4 {
  static constexpr int kWords = kWordsOfX, kGroups = kGroupsOfTile;
  struct Factors {
    RowValues<kGroups> scale[kWords];  // of each word: scale / divisor * x_scale / 2, 2^-15 of it for the second word
    __m512 less_zero(int, __m512 x_sum, __m512 sum) const { return _mm512_sub_ps(sum, x_sum); }
  };
  static __m512 of_x_sum(__m512 x_sum) { return _mm512_mul_ps(x_sum, _mm512_set1_ps(kFp4Zero)); }
  static __m512i low(__m512i bytes) { return _mm512_permutexvar_epi8(bytes, entries()); }
  static __m512i high(__m512i bytes) { return _mm512_permutexvar_epi8(_mm512_srli_epi16(bytes, 4), entries()); }

 private:
  // Four copies: `vpermb` uses the lower six bits as an index.
  static __m512i entries() { return _mm512_broadcast_i32x4(fp4_bytes()); }
};

// Factors of all chunks of one N-tile and one row of x. Not inlined: the consuming loop must read memory, where a
// broadcast is free, instead of permuting registers.
template <int kWords, int kGroups>
[[gnu::noinline]] void make_factors(const Job& job, int64_t tile, int64_t m, Int4<kWords, kGroups>,
                                    typename Int4<kWords, kGroups>::Factors* factors) {
  constexpr bool kHalves = kGroups == 2;
  constexpr __mmask16 kUpperRows = 0xFF00;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
    const __m512 x_scale = _mm512_set1_ps(job.fixed_point.scales[m * job.fixed_point.chunks + chunk]);
    const int64_t s = kHalves ? 2 * chunk : chunk, next = kHalves && s + 1 < job.sections ? s + 1 : s;
    const GroupVectors halves[2] = {load_group(job, tile, s / job.sections_per_group),
                                    load_group(job, tile, next / job.sections_per_group)};
    __m512 scale[2] = {halves[0].scale, halves[1].scale}, zero[2] = {halves[0].zero, halves[1].zero};
    for (int h = 0; h < 2; ++h) {
      scale[h] = _mm512_mul_ps(scale[h], x_scale);
      scale[h] = _mm512_mask_mul_ps(scale[h], kUpperRows, scale[h], _mm512_set1_ps(1.0f / 16));
      zero[h] = _mm512_mask_mul_ps(zero[h], kUpperRows, zero[h], _mm512_set1_ps(16));
    }
    factors[chunk].zero.set(zero[0], zero[1]);
    for (int w = 0; w < kWords; ++w) {
      factors[chunk].scale[w].set(scale[0], scale[1]);
      for (int h = 0; h < 2; ++h) scale[h] = _mm512_mul_ps(scale[h], _mm512_set1_ps(1.0f / (1 << kWordShift)));
    }
  }
}

template <int kWords, int kGroups>
[[gnu::noinline]] void make_factors(const Job& job, int64_t tile, int64_t m, Fp4<kWords, kGroups>,
                                    typename Fp4<kWords, kGroups>::Factors* factors) {
  const __m512 of_rows = _mm512_mul_ps(fp4_row_factors(job, tile), _mm512_set1_ps(0.5f));
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
    __m512 scale[4];
    __m512 factor = _mm512_mul_ps(of_rows, _mm512_set1_ps(job.fixed_point.scales[m * job.fixed_point.chunks + chunk]));
    for (int i = 0; i < kGroups; ++i) {
      scale[i] = _mm512_mul_ps(load_fp4_scales(job, tile, least(kGroups * chunk + i, job.groups - 1)), factor);
    }
    for (int w = 0; w < kWords; ++w) {
      if constexpr (kGroups == 4) {
        factors[chunk].scale[w].set(scale);
      } else {
        factors[chunk].scale[w].set(scale[0], scale[1]);
      }
      for (int i = 0; i < kGroups; ++i) scale[i] = _mm512_mul_ps(scale[i], _mm512_set1_ps(1.0f / (1 << kWordShift)));
    }
  }
}

// 256 * sum(w * high) + sum(w * low), per lane.
template <int kTiles>
__attribute__((always_inline)) inline __m512 dot(const __m512i (&w)[kTiles], const __m512i (&x)[kTiles][2]) {
  __m512i sum = _mm512_setzero_si512();
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) sum = _mm512_dpbusd_epi32(sum, w[t], x[t][0]);
  sum = _mm512_slli_epi32(sum, 8);
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) sum = _mm512_dpbusd_epi32(sum, w[t], x[t][1]);
  return _mm512_cvtepi32_ps(sum);
}

// sums[row] += kTiles K-tiles of one chunk: the words that every chunk has, or the additional one.
template <typename W, int kTiles, bool kIsMore>
__attribute__((always_inline)) inline void add_tiles(const uint8_t* weight, const int8_t* const (&x)[kMaxWords],
                                                     int64_t t0, const typename W::Factors& factors,
                                                     __m512 (&sums)[kTileN]) {
  constexpr int kWords = kIsMore ? 1 : W::kWords, kFirst = kIsMore ? W::kWords : 0;
  __m512i planes[kWords][kTiles][2];
  __m512 x_sums[kWords];
#pragma GCC unroll 2
  for (int w = 0; w < kWords; ++w) {
    __m512i ones[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const int8_t* bytes = x[kFirst + w] + (t0 + t) * 2 * kTileK;
      planes[w][t][0] = _mm512_load_si512(bytes);
      planes[w][t][1] = _mm512_load_si512(bytes + kTileK);
      ones[t] = _mm512_set1_epi8(1);
    }
    x_sums[w] = W::of_x_sum(dot<kTiles>(ones, planes[w]));
  }
#pragma GCC unroll 8
  for (int g = 0; g < kPairs; ++g) {
    __m512i low[kTiles], high[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* pair = weight + (t0 + t) * kTileBytes + g * kTileK;
      const __m512i bytes = _mm512_loadu_si512(pair);
      low[t] = W::low(bytes);
      high[t] = W::high(bytes);
    }
#pragma GCC unroll 2
    for (int w = 0; w < kWords; ++w) {
      __m512 a = factors.less_zero(g, x_sums[w], dot<kTiles>(low, planes[w]));
      __m512 b = factors.less_zero(g + kPairs, x_sums[w], dot<kTiles>(high, planes[w]));
      if constexpr (kIsMore) {
        const __m512 unit = _mm512_set1_ps(1.0f / (1 << kWordShift * kFirst));
        a = _mm512_mul_ps(a, unit), b = _mm512_mul_ps(b, unit);
      }
      sums[g] = _mm512_fmadd_ps(a, factors.scale[w][g], sums[g]);
      sums[g + kPairs] = _mm512_fmadd_ps(b, factors.scale[w][g + kPairs], sums[g + kPairs]);
    }
  }
}

template <typename W, int kTiles>
void run_tile(const Job& job, int64_t tile, int64_t m, const typename W::Factors* factors, WeightStream stream) {
  const uint8_t* weight = job.weight + tile * job.tiles_k * kTileBytes;
  const int8_t* x[kMaxWords] = {};
  for (int w = 0; w <= W::kWords; ++w) x[w] = job.fixed_point.bytes[w] + m * job.tiles_k * 2 * kTileK;
  __m512 sums[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) sums[row] = _mm512_setzero_ps();

  // Mainloop over the words of every chunk
  int64_t t = 0, chunk = 0;
  for (; t + kTiles <= job.tiles_k; t += kTiles, ++chunk) {
#pragma GCC unroll 4
    for (int i = 0; i < kTiles; ++i) stream.fetch();
    add_tiles<W, kTiles, false>(weight, x, t, factors[chunk], sums);
  }
  for (; t < job.tiles_k; ++t) {
    stream.fetch();
    add_tiles<W, 1, false>(weight, x, t, factors[chunk], sums);
  }
  // Additional words in a separate loop, so that the loop above has enough registers.
  const uint8_t* chunk_words = job.fixed_point.chunk_words + m * job.fixed_point.chunks;
  for (chunk = 0; (job.remarks[m] & kHasMoreWords) != 0 && chunk < job.fixed_point.chunks; ++chunk) {
    if (chunk_words[chunk] == W::kWords) continue;
    const int64_t end = least((chunk + 1) * kTiles, job.tiles_k);
    for (t = chunk * kTiles; t < end; ++t) add_tiles<W, 1, true>(weight, x, t, factors[chunk], sums);
  }

  // Reduce sixteen rows of lanes to one vector of row sums.
  __m512i lanes[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) lanes[row] = _mm512_castps_si512(sums[row]);
  transpose16(lanes);
#pragma GCC unroll 4
  for (int distance = 8; distance > 0; distance /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < distance; ++i) {
      lanes[i] =
          _mm512_castps_si512(_mm512_add_ps(_mm512_castsi512_ps(lanes[i]), _mm512_castsi512_ps(lanes[i + distance])));
    }
  }
  // Epilogue
  const int64_t n = tile * kTileN;
  const __mmask16 mask = first(job.n - n);
  __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(lanes[0]), _mm512_set1_ps(job.x_scales[m * job.x_scale_stride]));
  if (job.bias != nullptr) y = _mm512_add_ps(y, load16(job.bias, n, job.bias_dtype, mask));
  store16(job.y, m * job.n + n, job.y_dtype, y, mask);
}

template <typename W, int kTiles>
void run(const Job& job, int64_t begin, int64_t end) {
  using Row = typename W::Factors;
  const uint8_t* begin_weight = job.weight + begin * job.tiles_k * kTileBytes;
  Row* factors = static_cast<Row*>(scratch(Scratch::kPanel, job.fixed_point.chunks * int64_t{sizeof(Row)}));
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t m = 0; m < job.m; ++m) {
      make_factors(job, tile, m, W(), factors);
      run_tile<W, kTiles>(job, tile, m, factors, WeightStream(begin_weight, tile - begin, job.tiles_k));
    }
  }
}

}  // namespace

void avx512::fixed_point_int4_gemv(const Job& job, int64_t begin, int64_t end) {
  for_chunks_of(job, [&]<Format kFormat, int kWords, int kGroups, int kTiles> {
    using W = std::conditional_t<kFormat == Format::kFp4, Fp4<kWords, kGroups>, Int4<kWords, kGroups>>;
    run<W, kTiles>(job, begin, end);
  });
}

}  // namespace qao::cpu
