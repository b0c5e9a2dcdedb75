// W8A8 GEMM with VNNI, sums in int32 over all of K.
// W ^ 0x80 is W + 128; 128 times the sum of x is subtracted at the end.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/int8_panel.h"

namespace qao::cpu {
namespace {

struct Int8 : PlainTotals<Int8Panel>, EightBits {
  using Total = __m512i;
  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      __m512i quads[kTileRows];
      load_lanes(job, tile_n, panel * kPanelColumns + k, quads);
      lanes_to_quads(quads);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        _mm512_store_si512(out + (k / kColumns + i) * stride, _mm512_xor_si512(quads[i], _mm512_set1_epi8(-128)));
      }
    }
  }

  static Total load_total(const uint32_t* totals) { return _mm512_load_si512(totals); }
  static void store(uint32_t* totals, Total total) { _mm512_store_si512(totals, total); }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    Columns columns[kTiles];
    __m512 scales[kTiles];
    __m512i w_sums[kTiles];
    for (int t = 0; t < kTiles; ++t) {
      const int64_t n = (tile_n + t) * kTileRows;
      columns[t] = load_columns(job, n), scales[t] = load_scales(job, n);
      w_sums[t] = sums_of_integers(job, n, scales[t]);
    }
    write_rows<kTiles>(job, tile_n, rows, [&](int64_t m, int t) {
      const __m512i excess = _mm512_set1_epi32(static_cast<int32_t>(128 * job.x_sums[m]));
      const __m512i sum = _mm512_sub_epi32(load_total(totals + (m * kTiles + t) * kTileRows), excess);
      const __m512i value = less_zero(job, m, sum, w_sums[t]);
      return value_of_y(job, columns[t], m, _mm512_mul_ps(_mm512_cvtepi32_ps(value), scales[t]));
    });
  }
};

}  // namespace

void avx512::int8_int8_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Int8>(job, begin, end); }

}  // namespace qao::cpu
