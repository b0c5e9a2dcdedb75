// W4A16 GEMM with x in fixed point and VNNI.
// 16 rows of W are in the lanes of a register, four k at a time.
//
// Per chunk of K, the nibbles of 16 or 32 rows of W are expanded into a panel in L1, [four k][16 rows][4 bytes]. Every
// row of x then broadcasts four bytes to multiply it. Rows 8..15 hold 16 times their nibble, which their scales undo.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/int4_panel.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kMaxTiles = kMaxSection / kTileK;
constexpr int kPanelRow = 64;
constexpr int kRowsX = 6;  // rows of x at once: 2 x 6 sums, 2 of W, and operands

// sums += W * x over one plane (high or low bytes) of a section: panel visits [begin, end) of each of `tiles` K-tiles.
template <int kN, int kM>
__attribute__((always_inline)) inline void add_plane(const uint8_t* panel, const int8_t* x, int64_t x_row,
                                                     int64_t x_tile, int64_t tiles, int half, __m512i (&sums)[kN][kM]) {
  const auto visit_range = [&]<int kBegin, int kEnd>() __attribute__((always_inline)) {
    for (int64_t t = 0; t < tiles; ++t) {
#pragma GCC unroll 16
      for (int visit = kBegin; visit < kEnd; ++visit) {
        __m512i w[kN];
#pragma GCC unroll 2
        for (int n = 0; n < kN; ++n) {
          w[n] = _mm512_load_si512(panel + (n * kMaxTiles + t) * kTilePanel + visit * 64);
        }
#pragma GCC unroll 6
        for (int i = 0; i < kM; ++i) {
          const __m512i four = broadcast_quad(x + i * x_row + t * x_tile + quad_of(visit) * 4);
#pragma GCC unroll 2
          for (int n = 0; n < kN; ++n) sums[n][i] = _mm512_dpbusd_epi32(sums[n][i], w[n], four);
        }
      }
    }
  };
  if (half < 0) {
    visit_range.template operator()<0, 16>();
  } else if (half == 0) {
    visit_range.template operator()<0, 8>();
  } else {
    visit_range.template operator()<8, 16>();
  }
}

// Position of section `s`.
struct Walk {
  int64_t chunk, tile, tiles;
  int half;  // of one K-tile, or -1
};
Walk walk(const Job& job, int64_t s) {
  const int64_t tile = s * job.section / kTileK;
  return {tile / job.fixed_point.chunk_tiles, tile, least(job.fixed_point.chunk_tiles, job.tiles_k - tile),
          job.section < kTileK ? static_cast<int>(s % 2) : -1};
}

// Sums of word `w` of section `s` for rows m .. m + kM of x, in units of that word.
template <int kN, int kM>
__attribute__((always_inline)) inline void multiply_word(const Job& job, int64_t m, int64_t s, int w,
                                                         const uint8_t* panel, const GroupVectors (&sections)[kN],
                                                         __m512 (&values)[kN][kM]) {
  const Walk at = walk(job, s);
  constexpr int64_t kXTile = 2 * kTileK;
  const int64_t x_row = job.tiles_k * kXTile;
  const int8_t* x = job.fixed_point.bytes[w] + m * x_row + at.tile * kXTile;
  __m512i sums[kN][kM];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_si512();
  }
  add_plane<kN, kM>(panel, x, x_row, kXTile, at.tiles, at.half, sums);
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_slli_epi32(sum, 8);
  }
  add_plane<kN, kM>(panel, x + kTileK, x_row, kXTile, at.tiles, at.half, sums);
  for (int i = 0; i < kM; ++i) {
    const __m512 x_sum = _mm512_set1_ps(job.fixed_point.sums[w][(m + i) * job.sections + s]);
    for (int n = 0; n < kN; ++n) {
      values[n][i] = _mm512_fnmadd_ps(sections[n].zero, x_sum, _mm512_cvtepi32_ps(sums[n][i]));
    }
  }
}

// The last word of a single row, when its neighbors have none.
template <int kN>
[[gnu::noinline]] void last_word(const Job& job, int64_t m, int64_t s, const uint8_t* panel,
                                 const GroupVectors (&sections)[kN], float (&last)[kN][kTileN]) {
  __m512 values[kN][1];
  multiply_word<kN, 1>(job, m, s, job.fixed_point.words, panel, sections, values);
  for (int n = 0; n < kN; ++n) _mm512_store_ps(last[n], values[n][0]);
}

// total[i][16 kN] += section `s` for rows m .. m + kM of x.
template <int kN, int kM>
void multiply(const Job& job, int64_t m, int64_t s, const uint8_t* panel, const GroupVectors (&sections)[kN],
              float* total) {
  const int64_t chunk = walk(job, s).chunk;
  const auto has_more = [&](int i) {
    return job.fixed_point.chunk_words[(m + i) * job.fixed_point.chunks + chunk] > job.fixed_point.words;
  };
  int more = 0;  // number of rows with one more word
  for (int i = 0; i < kM; ++i) more += has_more(i);
  __m512 result[kN][kM];
  for (auto& row : result) {
    for (auto& value : row) value = _mm512_setzero_ps();
  }
  if (more > 0 && more < kM) {
#pragma GCC unroll 6
    for (int i = 0; i < kM; ++i) {
      if (!has_more(i)) continue;
      alignas(64) float last[kN][kTileN];
      last_word<kN>(job, m + i, s, panel, sections, last);
      for (int n = 0; n < kN; ++n) result[n][i] = _mm512_load_ps(last[n]);
    }
  }
  for (int w = more == kM ? job.fixed_point.words : job.fixed_point.words - 1; w >= 0; --w) {
    __m512 values[kN][kM];
    multiply_word<kN, kM>(job, m, s, w, panel, sections, values);
    for (int i = 0; i < kM; ++i) {
      for (int n = 0; n < kN; ++n) {
        result[n][i] = _mm512_fmadd_ps(result[n][i], _mm512_set1_ps(1.0f / (1 << kWordShift)), values[n][i]);
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    const __m512 x_scale = _mm512_set1_ps(job.fixed_point.scales[(m + i) * job.fixed_point.chunks + chunk]);
    for (int n = 0; n < kN; ++n) {
      float* at = total + (i * kN + n) * kTileN;
      const __m512 scaled = _mm512_mul_ps(result[n][i], x_scale);
      _mm512_store_ps(at, _mm512_fmadd_ps(scaled, sections[n].scale, _mm512_load_ps(at)));
    }
  }
}

template <int kN, int kM = kRowsX>
void multiply_some(const Job& job, int64_t m, int64_t rows, int64_t s, const uint8_t* panel,
                   const GroupVectors (&sections)[kN], float* total) {
  if constexpr (kM > 0) {
    if (rows == kM) return multiply<kN, kM>(job, m, s, panel, sections, total);
    multiply_some<kN, kM - 1>(job, m, rows, s, panel, sections, total);
  }
}

template <int kN>
void run_tiles(const Job& job, int64_t tile_n) {
  uint8_t* panel = static_cast<uint8_t*>(scratch(Scratch::kPanel, int64_t{kN} * kMaxTiles * kTilePanel));
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.m * kN * kTileN * int64_t{sizeof(float)}));
  for (int64_t i = 0; i < job.m * kN; ++i) _mm512_store_ps(total + i * kTileN, _mm512_setzero_ps());

  const int64_t sections_per_chunk = job.fixed_point.chunk_tiles * kTileK / job.section;
  for (int64_t chunk = 0; chunk < job.fixed_point.chunks; ++chunk) {
    const int64_t tile_k = chunk * job.fixed_point.chunk_tiles,
                  tiles = least(job.fixed_point.chunk_tiles, job.tiles_k - tile_k);
    for (int n = 0; n < kN; ++n) {
      const uint8_t* weight = job.weight + ((tile_n + n) * job.tiles_k + tile_k) * kTileBytes;
      for (int64_t t = 0; t < tiles; ++t) {
        for (int line = 0; line < kTileBytes; line += 64) {
          _mm_prefetch(weight + t * kTileBytes + kPrefetchBytes + line, _MM_HINT_T0);
        }
        expand_tile(weight + t * kTileBytes, panel + (n * kMaxTiles + t) * kTilePanel, kPanelRow);
      }
    }
    const int64_t end = least(job.sections, (chunk + 1) * sections_per_chunk);
    for (int64_t s = chunk * sections_per_chunk; s < end; ++s) {
      GroupVectors sections[kN];
      for (int n = 0; n < kN; ++n)
        sections[n] = for_shifted_rows(load_group(job, tile_n + n, s / job.sections_per_group));
      for (int64_t m = 0; m < job.m; m += kRowsX) {
        multiply_some<kN>(job, m, least(kRowsX, job.m - m), s, panel, sections, total + m * kN * kTileN);
      }
    }
  }
  for (int n = 0; n < kN; ++n) {
    const int64_t row = (tile_n + n) * kTileN;
    const __mmask16 mask = first(job.n - row);
    const __m512 bias = job.bias != nullptr ? load16(job.bias, row, job.bias_dtype, mask) : _mm512_setzero_ps();
    for (int64_t m = 0; m < job.m; ++m) {
      const __m512 x_scale = _mm512_set1_ps(job.x_scales[m * job.x_scale_stride]);
      const __m512 y = _mm512_fmadd_ps(_mm512_load_ps(total + (m * kN + n) * kTileN), x_scale, bias);
      store16(job.y, m * job.n + row, job.y_dtype, y, mask);
    }
  }
}

}  // namespace

void avx512::fixed_point_int4_gemm(const Job& job, int64_t begin, int64_t end) {
  int64_t tile = begin;
  for (; tile + 2 <= end; tile += 2) run_tiles<2>(job, tile);
  if (tile < end) run_tiles<1>(job, tile);
}

}  // namespace qao::cpu
