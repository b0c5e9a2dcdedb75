// 4-bit W by a few rows of x in fixed point with `vpmaddubsw`.
// It multiplies W's unsigned nibbles by the signed bytes of x. For fp4, `vpshufb` converts codes to bytes 0..24: twice
// the value, plus 12.
//
// Sums of a chunk stay in 16 bits: 15 * 128 * 2 per pair of products, at most 8 of them in 256 k, is 30720 < 2^15; fp4
// chunks have 64 k. Per chunk and row, with exact integer sums:  y += scale * x_scale * (sum(q * x) - zero * sum(x)).
#include <type_traits>

#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/x86/avx2/fp4.h"
#include "cpu/x86/avx2/simd.h"
#include "cpu/x86/fixed_point_gemv.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kVectors = kTileK / 32;   // of one row pair's 64 bytes
constexpr int64_t kXTile = 2 * kTileK;  // of a word of x

// A value per row of W for a chunk. With groups of 32 the lanes of a row belong to two groups, in the pattern 0 0 1 1
// twice, with groups of 16 to four. Then four values are stored, otherwise one.
template <int kGroups>
struct RowValues {
  static constexpr int kStored = kGroups == 1 ? 1 : 4;
  alignas(32) float values[kTileN * kStored];

  void set(int row, float group0, float group1) {
    for (int i = 0; i < kStored; ++i) values[row * kStored + i] = i < 2 ? group0 : group1;
  }
  // Sets four values each of eight rows.
  void set(int row, const __m256 (&groups)[4]) {
    const __m256 low[2] = {_mm256_unpacklo_ps(groups[0], groups[1]), _mm256_unpacklo_ps(groups[2], groups[3])};
    const __m256 high[2] = {_mm256_unpackhi_ps(groups[0], groups[1]), _mm256_unpackhi_ps(groups[2], groups[3])};
    const __m256 rows[4] = {_mm256_shuffle_ps(low[0], low[1], 0x44), _mm256_shuffle_ps(low[0], low[1], 0xEE),
                            _mm256_shuffle_ps(high[0], high[1], 0x44), _mm256_shuffle_ps(high[0], high[1], 0xEE)};
    for (int r = 0; r < 4; ++r) {  // row r + 4 is in the upper lane
      _mm_store_ps(values + 4 * (row + r), _mm256_castps256_ps128(rows[r]));
      _mm_store_ps(values + 4 * (row + r + 4), _mm256_extractf128_ps(rows[r], 1));
    }
  }
  __m256 operator[](int row) const {
    if constexpr (kGroups > 1) {
      return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(values + 4 * row));
    } else {
      return _mm256_broadcast_ss(values + row);
    }
  }
};

// Operand bytes of W, of row g and (shifted down) of row g + 8, and the factors of a chunk.
template <int kGroupsOfTile>
struct Int4 {
  static constexpr int kGroups = kGroupsOfTile;
  struct Factors {
    RowValues<kGroups> scale, zero;  // scale includes x's
    __m256 less_zero(int row, __m256 x_sum, __m256 sum) const { return _mm256_fnmadd_ps(zero[row], x_sum, sum); }
  };
  static __m256 of_x_sum(__m256 x_sum) { return x_sum; }
  static __m256i nibbles(__m256i bytes) { return _mm256_and_si256(bytes, _mm256_set1_epi8(0x0F)); }
};

template <int kGroupsOfTile>
struct Fp4 {
  static constexpr int kGroups = kGroupsOfTile;
  struct Factors {
    RowValues<kGroups> scale;  // half of the scale, divided by the row's divisor
    __m256 less_zero(int, __m256 x_sum, __m256 sum) const { return _mm256_sub_ps(sum, x_sum); }
  };
  static __m256 of_x_sum(__m256 x_sum) { return _mm256_mul_ps(x_sum, _mm256_set1_ps(kFp4Zero)); }
  static __m256i nibbles(__m256i bytes) {
    const __m256i index = _mm256_and_si256(bytes, _mm256_set1_epi8(0x0F));
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(fp4_bytes()), index);
  }
};

struct Section {
  alignas(32) float scale[kTileN], zero[kTileN];
};
void load_section(const Job& job, int64_t tile, int64_t s, Section* section) {
  const int64_t offset = (tile * job.groups + s / job.sections_per_group) * job.parameters * kTileN;
  for (int row = 0; row < kTileN; row += 8) {
    _mm256_store_ps(section->scale + row, load8(job.scales, offset + row, job.scale_dtype));
    _mm256_store_ps(section->zero + row, job.parameters == 2 ? load8(job.scales, offset + kTileN + row, job.scale_dtype)
                                                             : _mm256_set1_ps(int4::kSymmetricZero));
  }
}

template <int kGroups>
void make_factors(const Job& job, int64_t tile, int64_t chunk, float x_scale, Int4<kGroups>,
                  typename Int4<kGroups>::Factors* factors) {
  constexpr bool kHalves = kGroups == 2;
  Section sections[2];
  const int64_t s = kHalves ? 2 * chunk : chunk;
  load_section(job, tile, s, &sections[0]);
  if (kHalves) load_section(job, tile, s + 1 < job.sections ? s + 1 : s, &sections[1]);
  const Section &a = sections[0], &b = sections[kHalves];
  for (int row = 0; row < kTileN; ++row) {
    factors->scale.set(row, a.scale[row] * x_scale, b.scale[row] * x_scale);
    factors->zero.set(row, a.zero[row], b.zero[row]);
  }
}

template <int kGroups>
void make_factors(const Job& job, int64_t tile, int64_t chunk, float x_scale, Fp4<kGroups>,
                  typename Fp4<kGroups>::Factors* factors) {
  for (int v = 0; v < 2; ++v) {
    const __m256 factor = _mm256_mul_ps(fp4_row_factors(job, tile, v), _mm256_set1_ps(x_scale * 0.5f));
    __m256 scales[4];
    for (int i = 0; i < 4; ++i) {
      const int64_t group = least(kGroups * chunk + i / (4 / kGroups), job.groups - 1);
      scales[i] = _mm256_mul_ps(load_fp4_scales(job, tile, group, v), factor);
    }
    factors->scale.set(8 * v, scales);
  }
}

// 256 * sum(w * high) + sum(w * low), per lane.
template <int kTiles>
__attribute__((always_inline)) inline __m256 dot(const __m256i (&w)[kTiles * kVectors], const int8_t* x) {
  __m256i high = _mm256_setzero_si256(), low = _mm256_setzero_si256();
#pragma GCC unroll 8
  for (int i = 0; i < kTiles * kVectors; ++i) {
    const __m256i* bytes = reinterpret_cast<const __m256i*>(x + i / kVectors * kXTile) + i % kVectors;
    high = _mm256_add_epi16(high, _mm256_maddubs_epi16(w[i], _mm256_load_si256(bytes)));
    low = _mm256_add_epi16(low, _mm256_maddubs_epi16(w[i], _mm256_load_si256(bytes + kVectors)));
  }
  return _mm256_cvtepi32_ps(
      _mm256_add_epi32(_mm256_madd_epi16(high, _mm256_set1_epi16(256)), _mm256_madd_epi16(low, _mm256_set1_epi16(1))));
}

// sums[row] += kWords words of kTiles K-tiles of one chunk, in units of the first of these words.
template <typename W, int kTiles, int kWords>
void add_tiles(const uint8_t* weight, const int8_t* const* x, const typename W::Factors& factors,
               __m256 (&sums)[kTileN]) {
  constexpr float kNextWord = 1.0f / (1 << kWordShift);
  __m256i ones[kTiles * kVectors];
  for (__m256i& one : ones) one = _mm256_set1_epi8(1);
  __m256 x_sums[kWords];
  for (int w = 0; w < kWords; ++w) x_sums[w] = W::of_x_sum(dot<kTiles>(ones, x[w]));

#pragma GCC unroll 8
  for (int g = 0; g < kPairs; ++g) {
    __m256i low[kTiles * kVectors], high[kTiles * kVectors];
#pragma GCC unroll 8
    for (int i = 0; i < kTiles * kVectors; ++i) {
      const uint8_t* bytes = weight + i / kVectors * kTileBytes + g * kTileK + i % kVectors * 32;
      if (i % kVectors == 0) _mm_prefetch(bytes + kPrefetchBytes, _MM_HINT_T0);
      const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes));
      low[i] = W::nibbles(both);
      high[i] = W::nibbles(_mm256_srli_epi16(both, 4));
    }
    const auto add_row = [&](int row, const __m256i(&q)[kTiles* kVectors]) __attribute__((always_inline)) {
      const auto word = [&](int w) { return factors.less_zero(row, x_sums[w], dot<kTiles>(q, x[w])); };
      __m256 value = word(kWords - 1);
      for (int w = kWords - 2; w >= 0; --w) value = _mm256_fmadd_ps(value, _mm256_set1_ps(kNextWord), word(w));
      sums[row] = _mm256_fmadd_ps(value, factors.scale[row], sums[row]);
    };
    add_row(g, low);
    add_row(g + kPairs, high);
  }
}

__m256 row_sums(const __m256* lanes) {  // of eight rows
  const auto add_pairs = [](__m256 a, __m256 b) { return _mm256_hadd_ps(a, b); };
  const __m256 rows0123 = add_pairs(add_pairs(lanes[0], lanes[1]), add_pairs(lanes[2], lanes[3]));
  const __m256 rows4567 = add_pairs(add_pairs(lanes[4], lanes[5]), add_pairs(lanes[6], lanes[7]));
  return _mm256_add_ps(_mm256_permute2f128_ps(rows0123, rows4567, 0x20),
                       _mm256_permute2f128_ps(rows0123, rows4567, 0x31));
}

template <typename W, int kTiles, int kWords>
void run_tile(const Job& job, int64_t tile, int64_t m) {
  const uint8_t* weight = job.weight + tile * job.tiles_k * kTileBytes;
  const int8_t* words[kMaxWords] = {};
  for (int w = 0; w <= job.fixed_point.words; ++w) words[w] = job.fixed_point.bytes[w] + m * job.tiles_k * kXTile;
  const uint8_t* chunk_words = job.fixed_point.chunk_words + m * job.fixed_point.chunks;
  const float* x_scales = job.fixed_point.scales + m * job.fixed_point.chunks;
  __m256 sums[kTileN];
  for (__m256& sum : sums) sum = _mm256_setzero_ps();

  typename W::Factors factors;
  // Adds kCount words from kFirst on of a chunk.
  const auto add_chunk = [&]<int kFirst, int kCount>(int64_t chunk) {
    constexpr float kUnit = kFirst == 0 ? 1.0f : kFirst == 1 ? 0x1p-15f : 0x1p-30f;
    make_factors(job, tile, chunk, x_scales[chunk] * kUnit, W(), &factors);
    const int64_t first = chunk * kTiles;
    const int8_t* x[kCount];
    if (first + kTiles <= job.tiles_k) {
      for (int w = 0; w < kCount; ++w) x[w] = words[kFirst + w] + first * kXTile;
      add_tiles<W, kTiles, kCount>(weight + first * kTileBytes, x, factors, sums);
      return;
    }
    for (int64_t t = first; t < job.tiles_k; ++t) {
      for (int w = 0; w < kCount; ++w) x[w] = words[kFirst + w] + t * kXTile;
      add_tiles<W, 1, kCount>(weight + t * kTileBytes, x, factors, sums);
    }
  };
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) add_chunk.template operator()<0, kWords>(chunk);
  for (int64_t chunk = 0; (job.remarks[m] & kHasMoreWords) != 0 && chunk < job.fixed_point.chunks; ++chunk) {
    if (chunk_words[chunk] > kWords) add_chunk.template operator()<kWords, 1>(chunk);
  }

  for (int row = 0; row < kTileN; row += 8) {
    const int64_t n = tile * kTileN + row, count = job.n - n;
    if (count <= 0) break;
    __m256 y = _mm256_mul_ps(row_sums(sums + row), _mm256_set1_ps(job.x_scales[m * job.x_scale_stride]));
    if (job.bias != nullptr) y = _mm256_add_ps(y, load_first(job.bias, n, job.bias_dtype, count));
    store_first(job.y, m * job.n + n, job.y_dtype, y, count);
  }
}

template <typename W, int kTiles, int kWords>
void run(const Job& job, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t m = 0; m < job.m; ++m) run_tile<W, kTiles, kWords>(job, tile, m);
  }
}

}  // namespace

void avx2::fixed_point_int4_gemv(const Job& job, int64_t begin, int64_t end) {
  for_chunks_of(job, [&]<Format kFormat, int kWords, int kGroups, int kTiles> {
    using W = std::conditional_t<kFormat == Format::kFp4, Fp4<kGroups>, Int4<kGroups>>;
    run<W, kTiles, kWords>(job, begin, end);
  });
}

}  // namespace qao::cpu
