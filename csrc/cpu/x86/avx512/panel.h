// Shared base of panel_gemm.h formats with AVX-512.
// It covers 64 rows of W, and the expansion of bytes to panels. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx512/int8_output.h"
#include "cpu/x86/panel_gemm.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

// Registers: 24 sums, 4 of W, and a word of x.
struct Avx512Panel {
  static constexpr int kLanes = 16, kVectors = 4, kStepsOfPart = 1, kPanelsAtOnce = 1;
  static constexpr int64_t kSteps = 64;
  static constexpr bool kHasShortSections = false, kHasRests = false, kTakesZerosOff = false;
  using Operand = __m512i;
  static Operand load(const uint32_t* words) { return _mm512_load_si512(words); }
  static Operand broadcast(const uint32_t* word) { return _mm512_set1_epi32(static_cast<int>(*word)); }
  static __m512 plus(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512i plus(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
};

inline __m512 load_floats(const uint32_t* words) { return _mm512_load_ps(reinterpret_cast<const float*>(words)); }
inline void store_floats(uint32_t* words, __m512 values) { _mm512_store_ps(reinterpret_cast<float*>(words), values); }

struct FloatTotals {
  using Total = __m512;
  static Total load_total(const uint32_t* totals) { return load_floats(totals); }
  static void store(uint32_t* totals, Total total) { store_floats(totals, total); }
};

struct FloatSums : Avx512Panel, FloatTotals {
  using Sum = __m512;
  static Sum zero() { return _mm512_setzero_ps(); }
};

// Loads 16 rows of 8-bit W, 64 columns from `k` on, as lanes (simd.h). Zeros past K. Rows past N repeat the last one;
// their results are not written.
__attribute__((always_inline)) inline void load_lanes(const Job& job, int64_t tile_n, int64_t k,
                                                      __m512i (&lanes)[kTileRows]) {
  const int64_t n = tile_n * kTileRows, rows = least(kTileRows, job.n - n), columns = job.k - k;
  const uint8_t* weight = job.weight + n * job.k + k;
  int64_t stride = job.k;
  alignas(64) uint8_t padded[kTileRows * kTileColumns];
  if (rows < kTileRows || columns < kTileColumns) [[unlikely]] {
    const __mmask64 inside = columns >= kTileColumns ? ~__mmask64{0} : ~__mmask64{0} >> (kTileColumns - columns);
    for (int64_t r = 0; r < kTileRows; ++r) {
      const __m512i row = _mm512_maskz_loadu_epi8(inside, weight + least(r, rows - 1) * job.k);
      _mm512_store_si512(padded + r * kTileColumns, row);
    }
    weight = padded, stride = kTileColumns;
  }
  // Loads both halves of a row together: rows 4 KB apart evict each other from L1.
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const uint8_t* row = weight + (i % 4 + i / 4 * 8) * stride;
    lanes[i] = load_halves(row, row + 4 * stride);
    lanes[i + 8] = load_halves(row + 32, row + 4 * stride + 32);
  }
  halves_to_lanes(lanes);
}

// A K-tile of int4 W: quads[4t + step] has the nibbles of columns 16 step + 2t, and of those 8, 1 and 9 further.
__attribute__((always_inline)) inline void load_nibbles(const uint8_t* weight, __m512i (&quads)[kTileRows]) {
  const __m512i nibble = _mm512_set1_epi8(0x0F);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {  // row g in the lower nibbles, row g + 8 in the upper ones
    const uint8_t* row = weight + i % 4 * kTileColumns + i / 4 * 32;
    const __m512i bytes = load_halves(row, row + 4 * kTileColumns);
    quads[i + i / 4 * 4] = _mm512_and_si512(bytes, nibble);
    quads[i + i / 4 * 4 + 4] = _mm512_and_si512(_mm512_srli_epi16(bytes, 4), nibble);
  }
  halves_to_lanes(quads);
  lanes_to_quads(quads);
}

// Writes value(m, t) to y[m] of kTiles N-tiles, 16 columns each.
template <int kTiles, typename Value>
__attribute__((always_inline)) inline void write_rows(const Job& job, int64_t tile_n, RowsOfY rows,
                                                      const Value& value) {
  const int64_t n = tile_n * kTileRows;
  for (int64_t m = rows.begin; m < rows.end; ++m) {
    each<kTiles / 2>([&]<int i>() {
      const int64_t column = n + 2 * i * kTileRows;
      store32(job.y, m * job.n + column, job.y_dtype, value(m, 2 * i), value(m, 2 * i + 1), job.n - column);
    });
    if constexpr (kTiles % 2 == 1) {
      store16(job.y, m * job.n + n, job.y_dtype, value(m, 0), first(job.n - n));
    }
  }
}

// Writes y from float totals times scales(tile_n) and, with kTimesX, times the scale of x.
template <int kTiles, bool kTimesX, typename Scales>
void write_tiles(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows, const Scales& scales) {
  __m512 scale[kTiles], bias[kTiles];
  for (int t = 0; t < kTiles; ++t) {
    const int64_t n = (tile_n + t) * kTileRows;
    scale[t] = scales(tile_n + t);
    bias[t] = load_columns(job, n).bias;
  }
  write_rows<kTiles>(job, tile_n, rows, [&](int64_t m, int t) {
    __m512 y = load_floats(totals + (m * kTiles + t) * kTileRows);
    if constexpr (kTimesX) y = _mm512_mul_ps(y, _mm512_set1_ps(job.x_scales[m * job.x_scale_stride]));
    return _mm512_fmadd_ps(y, scale[t], bias[t]);
  });
}
inline __m512 no_scales(int64_t) { return _mm512_set1_ps(1); }

}  // namespace
}  // namespace qao::cpu
