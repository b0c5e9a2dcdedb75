// A few rows of x against W with VNNI byte products: W's nibbles as they lie, unsigned, times the signed bytes of x in
// fixed point. One 64-byte load holds two rows of W over 64 k; `& 0x0F` is row g, `& 0xF0` is 16 times row g + 8.
//
// Per chunk and row, with integer sums exact:  y += scale * x_scale * (sum(q * x) - zero * sum(x)).
// Lanes stay apart until the end of the row: lane j always holds columns 4 j .. 4 j + 3 of tile_column()'s order.
#include "cpu/mm_kernels.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/simd.h"
#include "cpu/x86/weight_stream.h"
#include "int4/layout.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kPairs = 8;  // row pairs (g, g + 8) of a tile

// What a chunk needs of each row of W. With groups of 32 the lanes of a row belong to two groups, in the pattern
// 0 0 1 1: the four values are stored; otherwise one.
template <bool kHalves>
struct RowValues {
  static constexpr int kStored = kHalves ? 4 : 1;
  alignas(64) float values[kTileN * kStored];

  void set(__m512 group0, __m512 group1) {
    if constexpr (kHalves) {
      for (int i = 0; i < 4; ++i) {
        const __m512i row = _mm512_add_epi32(_mm512_setr_epi32(0, 0, 16, 16, 1, 1, 17, 17, 2, 2, 18, 18, 3, 3, 19, 19),
                                             _mm512_set1_epi32(4 * i));
        _mm512_store_ps(values + 16 * i, _mm512_permutex2var_ps(group0, row, group1));
      }
    } else {
      _mm512_store_ps(values, group0);
    }
  }
  __m512 operator[](int row) const {
    if constexpr (kHalves) return _mm512_broadcast_f32x4(_mm_load_ps(values + 4 * row));
    return _mm512_set1_ps(values[row]);
  }
};

template <int kWords, bool kHalves>
struct Factors {
  RowValues<kHalves> scale[kWords];  // scale * x_scale, 1/16 of it for rows 8..15, 2^-15 of it for the second word
  RowValues<kHalves> zero;           // 16 times it for rows 8..15
};

// Of all chunks of one N-tile and one row of x. Not inlined: the loop that uses them shall read memory, where a
// broadcast is free, and not permute the registers they came from.
template <int kWords, bool kHalves>
[[gnu::noinline]] void make_factors(const Job& job, int64_t tile, int64_t m, Factors<kWords, kHalves>* factors) {
  constexpr __mmask16 kUpperRows = 0xFF00;
  for (int64_t chunk = 0; chunk < job.chunks; ++chunk) {
    const __m512 x_scale = _mm512_set1_ps(job.chunk_scales[m * job.chunks + chunk]);
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

// 256 * sum(w * high) + sum(w * low), lane by lane.
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

// sums[row] += kTiles K-tiles of one chunk.
template <int kWords, bool kHalves, int kTiles>
__attribute__((always_inline)) inline void add_tiles(const uint8_t* weight, const int8_t* x,
                                                     const Factors<kWords, kHalves>& factors, WeightStream& stream,
                                                     __m512 (&sums)[kTileN]) {
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) stream.fetch();
  __m512i planes[kWords][kTiles][2];
  __m512 x_sums[kWords];
#pragma GCC unroll 2
  for (int w = 0; w < kWords; ++w) {
    __m512i ones[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const int8_t* bytes = x + (t * kWords + w) * 2 * kTileK;
      planes[w][t][0] = _mm512_load_si512(bytes);
      planes[w][t][1] = _mm512_load_si512(bytes + kTileK);
      ones[t] = _mm512_set1_epi8(1);
    }
    x_sums[w] = dot<kTiles>(ones, planes[w]);
  }
#pragma GCC unroll 8
  for (int g = 0; g < kPairs; ++g) {
    __m512i low[kTiles], high[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const uint8_t* pair = weight + t * kTileBytes + g * kTileK;
      const __m512i bytes = _mm512_loadu_si512(pair);
      low[t] = _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F));
      high[t] = _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0)));
    }
#pragma GCC unroll 2
    for (int w = 0; w < kWords; ++w) {
      const __m512 a = _mm512_fnmadd_ps(factors.zero[g], x_sums[w], dot<kTiles>(low, planes[w]));
      const __m512 b = _mm512_fnmadd_ps(factors.zero[g + kPairs], x_sums[w], dot<kTiles>(high, planes[w]));
      sums[g] = _mm512_fmadd_ps(a, factors.scale[w][g], sums[g]);
      sums[g + kPairs] = _mm512_fmadd_ps(b, factors.scale[w][g + kPairs], sums[g + kPairs]);
    }
  }
}

template <int kWords, bool kHalves, int kTiles>
void run_tile(const Job& job, int64_t tile, int64_t m, const Factors<kWords, kHalves>* factors, WeightStream stream) {
  const uint8_t* weight = job.weight + tile * job.tiles_k * kTileBytes;
  const int8_t* x = job.fixed_point + m * job.tiles_k * kWords * 2 * kTileK;
  __m512 sums[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) sums[row] = _mm512_setzero_ps();

  int64_t t = 0, chunk = 0;
  for (; t + kTiles <= job.tiles_k; t += kTiles, ++chunk) {
    add_tiles<kWords, kHalves, kTiles>(weight + t * kTileBytes, x + t * kWords * 2 * kTileK, factors[chunk], stream,
                                       sums);
  }
  for (; t < job.tiles_k; ++t) {
    add_tiles<kWords, kHalves, 1>(weight + t * kTileBytes, x + t * kWords * 2 * kTileK, factors[chunk], stream, sums);
  }

  // Sixteen rows of lanes to one vector of row sums.
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
  const int64_t n = tile * kTileN;
  const __mmask16 mask = first(job.n - n);
  __m512 y = _mm512_mul_ps(_mm512_castsi512_ps(lanes[0]), _mm512_set1_ps(job.x_scales[m * job.x_scale_stride]));
  if (job.bias != nullptr) y = _mm512_add_ps(y, load16(job.bias, n, job.bias_dtype, mask));
  store16(job.y, m * job.n + n, job.y_dtype, y, mask);
}

template <int kWords, bool kHalves, int kTiles>
void run(const Job& job, int64_t begin, int64_t end) {
  using Row = Factors<kWords, kHalves>;
  const uint8_t* begin_weight = job.weight + begin * job.tiles_k * kTileBytes;
  Row* factors = static_cast<Row*>(scratch(Scratch::kPanel, job.chunks * int64_t{sizeof(Row)}));
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t m = 0; m < job.m; ++m) {
      make_factors(job, tile, m, factors);
      run_tile<kWords, kHalves, kTiles>(job, tile, m, factors, WeightStream(begin_weight, tile - begin, job.tiles_k));
    }
  }
}

template <int kWords>
void run_words(const Job& job, int64_t begin, int64_t end) {
  switch (job.section) {
    case 32:
      return run<kWords, true, 1>(job, begin, end);
    case 64:
      return run<kWords, false, 1>(job, begin, end);
    case 128:
      return run<kWords, false, 2>(job, begin, end);
    default:
      return run<kWords, false, 4>(job, begin, end);
  }
}

}  // namespace

void avx512::fixed_point_int4_gemv(const Job& job, int64_t begin, int64_t end) {
  job.words == 1 ? run_words<1>(job, begin, end) : run_words<2>(job, begin, end);
}

}  // namespace qao::cpu
