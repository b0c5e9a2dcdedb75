// Panels (panel_gemm.h) of GGUF W: 16 rows by 256 columns at a time, as codes with rows in the lanes and their scales.
// `static`: see numeric.h.
#pragma once

#include "cpu/x86/avx512/gguf_unpack.h"
#include "cpu/x86/avx512/panel.h"

namespace qao::cpu {
namespace {

// Of 16 rows and 256 columns, by segment; only that of the first where several have one scale.
struct GgufScales {
  alignas(64) float scale[gguf::kUnitSegments][kTileRows], minimum[gguf::kUnitSegments][kTileRows];
};

// In place: from rows of 64 bytes to lanes (simd.h).
__attribute__((always_inline)) inline void rows_to_lanes(__m512i (&a)[16]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i low01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x44);
    const __m512i high01 = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xEE);
    const __m512i low23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x44);
    const __m512i high23 = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xEE);
    a[i] = _mm512_shuffle_i32x4(low01, low23, 0x88), a[i + 4] = _mm512_shuffle_i32x4(low01, low23, 0xDD);
    a[i + 8] = _mm512_shuffle_i32x4(high01, high23, 0x88), a[i + 12] = _mm512_shuffle_i32x4(high01, high23, 0xDD);
  }
}

// Formats with this base expand several panels, 256 columns, at a time.
template <typename Panel>
struct GgufPanel : Panel {
  static constexpr int kBits = 0;
  static constexpr int64_t kPanelsAtOnce = gguf::kUnit / Panel::kPanelColumns;
  using Parameters = GgufScales;  // of the columns that were expanded last; job.groups is 1
  static void prepare(const Job&, int64_t, int64_t, Parameters*) {}
};

// Calls visit(segment, i, quad) with columns 4 i .. 4 i + 3 of each segment of 16, for columns [256 unit, + 256) of an
// N-tile; to_quads() orders their bytes. Zeros past K. Rows past N repeat the last one; their results are not written.
// Prefetches the same rows' next columns, or those of the rows `tiles` N-tiles further.
template <gguf::Type kType, typename ToQuads, typename Visit>
__attribute__((always_inline)) inline void expand_unit(const Job& job, int64_t tile_n, int64_t unit, int tiles,
                                                       GgufScales* out, const ToQuads& to_quads, const Visit& visit) {
  using namespace gguf;
  using B = Blocks<kType>;
  using U = Unpack<kType>;
  const int64_t next = next_unit<kType>(job, unit, tiles * kTileRows);
  __m512i codes[4][kTileRows], scales[kTileRows], minima[kTileRows];
  for (int r = 0; r < kTileRows; ++r) {
    uint8_t padded[kUnitBytes<kType>];
    Unit row;
    U::unpack(unit_of_row<kType>(job, tile_n * kTileRows + r, unit, next, padded), &row);
    for (int v = 0; v < 4; ++v) codes[v][r] = row.codes[v];
    scales[r] = _mm512_castps_si512(row.scales);
    if constexpr (B::kHasMinima && !U::kPairs) minima[r] = _mm512_castps_si512(row.minima);
  }
  transpose16(scales);
  if constexpr (B::kHasMinima && !U::kPairs) transpose16(minima);
  for (int s = 0; s < kUnitSegments; s += scale_columns(kType) / kSegment) {
    const int at = U::kPairs ? s / 2 : s;
    _mm512_store_si512(out->scale[s], scales[at]);
    if constexpr (B::kHasMinima) _mm512_store_si512(out->minimum[s], U::kPairs ? scales[8 + at] : minima[at]);
  }
  constexpr Segments kOrder = segment_order(kType);
  for (int v = 0; v < 4; ++v) {
    rows_to_lanes(codes[v]);
    to_quads(codes[v]);
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) visit(kOrder.of[4 * v + i / 4], i % 4, codes[v][i]);
  }
}

}  // namespace
}  // namespace qao::cpu
