// GGUF W by a few rows of x in fixed point with VNNI, any block type.
// 256 columns of a row of W become four vectors of unsigned codes in the order of segment_order(), which needs hardly
// any shuffles, since x was packed in that order. Vectors of the same groups are added as integers before their scale:
//   y += x_scale * sum over groups of scale * (sum(code * x) - offset * sum(x)) - minimum * sum(x).
// Offsets come off the exact integer sums. Four rows of W are read at a time, as four streams.
#include "cpu/gemm/kernels.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "cpu/x86/avx512/gguf_unpack.h"

namespace qao::cpu {
namespace {

using namespace gguf;

constexpr int kRows = 4;               // of W at a time
constexpr int64_t kAheadBytes = 4096;  // distance of prefetches in W, at least
constexpr int kPlanes = 2 * kTileColumns;

// The segment that lane `lane` of the scales of a chain multiplies: number lane / 4 of its vectors.
template <Type kType>
inline int segment_of(int chain, int lane) {
  constexpr Segments kOrder = segment_order(kType);
  return kOrder.of[chain * (16 / Unpack<kType>::kScales) + lane / 4];
}

// Lanes of Unit::scales for chain `chain`.
template <Type kType>
inline __m512i lanes_of(int chain) {
  using U = Unpack<kType>;
  alignas(64) int lanes[16];
  for (int l = 0; l < 16; ++l) {
    const int segment = segment_of<kType>(chain, l);
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

// The columns past the last whole chunk. Reads of 256 columns there end in the next row of W. The masks leave out its
// scales, which may be NaN.
template <Type kType>
struct Tail {
  using U = Unpack<kType>;
  explicit Tail(const Job& job) : columns(job.k % kUnit) {
    for (int lane = 0; lane < 16; ++lane) {
      minima |= static_cast<__mmask16>((lane * kSegment < columns) << lane);
      for (int c = 0; c < U::kScales; ++c) {
        scales[c] |= static_cast<__mmask16>((segment_of<kType>(c, lane) * kSegment < columns) << lane);
      }
    }
  }
  int64_t columns;
  __mmask16 minima = 0, scales[U::kScales] = {};  // lanes that count
};

// Rows n .. n + 3 of W by rows m .. m + kM of x.
template <Type kType, int kM>
void run_rows(const Job& job, const Tail<kType>& tail, int64_t n, int64_t m) {
  using B = Blocks<kType>;
  using U = Unpack<kType>;
  constexpr int kVectors = 4 / U::kScales;
  constexpr int64_t kBytes = kUnitBytes<kType>;
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

  // Chains [0, kChains) of a chunk, at at[r] of row r.
  const auto add_chunk = [&]<int kChains, bool kIsTail>(
                             int64_t chunk, const uint8_t* const(&at)[kRows]) __attribute__((always_inline)) {
#pragma GCC unroll 1
    for (int word = 0; word < kMaxWords; ++word) {
      bool any = false;
      for (int i = 0; i < kM; ++i) any |= word < job.fixed_point.chunk_words[(m + i) * job.fixed_point.chunks + chunk];
      if (!any) break;
      __m512 x_scale[kM];
      const int8_t* x[kM];
      __m512i offsets[kM][kChains];
#pragma GCC unroll 4
      for (int i = 0; i < kM; ++i) {
        // Where a row has fewer words, its factor is 0 for any bytes of word 0.
        const bool has = word < job.fixed_point.chunk_words[(m + i) * job.fixed_point.chunks + chunk];
        const float unit = word == 0 ? 1.0f : word == 1 ? 0x1p-15f : 0x1p-30f;
        x_scale[i] =
            _mm512_set1_ps(has ? job.fixed_point.scales[(m + i) * job.fixed_point.chunks + chunk] * unit : 0.0f);
        x[i] = job.fixed_point.bytes[has ? word : 0] + ((m + i) * job.fixed_point.chunks + chunk) * 4 * kPlanes;
        if constexpr (B::kOffset != 0) {
          const __m512i offset = _mm512_set1_epi8(static_cast<char>(B::kOffset));
          const __m512i same[2] = {offset, offset};
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) offsets[i][c] = dot<kVectors>(same, x[i] + c * kVectors * kPlanes);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        Unit unit;
        U::unpack(at[r], &unit);
        __m512 scale[kChains];
#pragma GCC unroll 4
        for (int c = 0; c < kChains; ++c) {
          scale[c] = kIsTail ? _mm512_maskz_permutexvar_ps(tail.scales[c], lanes[c], unit.scales)
                             : _mm512_permutexvar_ps(lanes[c], unit.scales);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kM; ++i) {
          __m512 sum;
#pragma GCC unroll 4
          for (int c = 0; c < kChains; ++c) {
            __m512i products = dot<kVectors>(unit.codes + c * kVectors, x[i] + c * kVectors * kPlanes);
            if constexpr (B::kOffset != 0) products = _mm512_sub_epi32(products, offsets[i][c]);
            const __m512 part = _mm512_cvtepi32_ps(products);
            sum = c == 0 ? _mm512_mul_ps(part, scale[c]) : _mm512_fmadd_ps(part, scale[c], sum);
          }
          sums[r][i] = _mm512_fmadd_ps(sum, x_scale[i], sums[r][i]);
          if (B::kHasMinima && word == 0) {
            __m512 minima = U::kPairs ? _mm512_permutexvar_ps(of_minima, unit.scales) : unit.minima;
            if (kIsTail) minima = _mm512_maskz_mov_ps(tail.minima, minima);
            const float* x_sums =
                job.fixed_point.segment_sums + ((m + i) * job.fixed_point.chunks + chunk) * kUnitSegments;
            sums[r][i] = _mm512_fnmadd_ps(minima, _mm512_load_ps(x_sums), sums[r][i]);
          }
        }
      }
    }
  };
  // Later rows from one end to the other, as one stream for each thread.
  const int64_t group = kRows * job.row_bytes, chunks = divide_up(job.k, kUnit);
  const uint8_t* const later = rows[0] + divide_up(kAheadBytes, group) * group;
  int64_t fetched = 0;
  const auto prefetch = [&](int64_t chunk) {
    for (; fetched < group * (chunk + 1) / chunks; fetched += 64) {
      _mm_prefetch(reinterpret_cast<const char*>(later + fetched), _MM_HINT_T1);
    }
  };

  const uint8_t* at[kRows];
  const int64_t whole = job.k / kUnit;
  for (int64_t chunk = 0; chunk < whole; ++chunk) {
    for (int r = 0; r < kRows; ++r) at[r] = rows[r] + chunk * kBytes;
    prefetch(chunk);
    add_chunk.template operator()<U::kScales, false>(chunk, at);
  }
  if constexpr (B::kColumns < kUnit) {
    if (tail.columns > 0) {
      const uint8_t* end = job.weight + job.n * job.row_bytes;
      const int64_t bytes = job.row_bytes - whole * kBytes;
      uint8_t padded[kRows][kBytes];
      for (int r = 0; r < kRows; ++r) {
        at[r] = rows[r] + whole * kBytes;
        if (at[r] + kBytes > end) [[unlikely]]
          at[r] = whole_unit<kType>(at[r], bytes, padded[r]);
      }
      prefetch(whole);
      constexpr int kHalf = U::kScales / 2;
      if (tail.columns <= kUnit / 2) {
        add_chunk.template operator()<kHalf, true>(whole, at);
      } else {
        add_chunk.template operator()<U::kScales, true>(whole, at);
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
    const Tail<kType> tail(job);
    for (int64_t n = begin * kTileRows; n < least(end * kTileRows, job.n); n += kRows) {
      int64_t m = 0;
      for (; m + 4 <= job.m; m += 4) run_rows<kType, 4>(job, tail, n, m);
      const int64_t left = job.m - m;
      if (left == 3) run_rows<kType, 3>(job, tail, n, m);
      if (left == 2) run_rows<kType, 2>(job, tail, n, m);
      if (left == 1) run_rows<kType, 1>(job, tail, n, m);
    }
  });
}

}  // namespace qao::cpu
