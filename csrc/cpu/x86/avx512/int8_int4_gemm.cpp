// W4A8 GEMM with VNNI.
// A panel holds W's nibbles, those of rows 8..15 times 16, which their scales undo. Per section, with exact integer
// sums:
//   total += scale * (sum(q * x) - zero * sum(x)).
// Zero points, x's first, are subtracted per section: if x is far from 0 along all of K, sums of its bytes are large.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/int4_panel.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/int8_panel.h"

namespace qao::cpu {
namespace {

struct Int4 : Int8Panel, FloatTotals {
  using Parameters = Int4Parameters;
  static constexpr int kBits = 4;
  static Sum less(Sum sums, int32_t zero, Sum w_sums) {
    return _mm512_sub_epi32(sums, _mm512_mullo_epi32(_mm512_set1_epi32(zero), w_sums));
  }
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Parameters* out) {
    store_group(for_shifted_rows(load_group(job, tile_n, group)), out);
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      const int64_t tile_k = (panel * kPanelColumns + k) / kTileColumns;
      const uint8_t* weight = job.weight + (tile_n * job.tiles_k + tile_k) * int4::kTileBytes;
      expand_tile(weight, reinterpret_cast<uint8_t*>(out + k / kColumns * stride), 4 * stride);
    }
  }

  struct Fold {
    __m512 scale;
    const float* zero;  // in memory: 24 sums leave few registers
  };
  using Row = __m512;  // its sum
  static Fold fold(const Job&, const Parameters& group, int, int64_t, int64_t) {
    return {_mm512_load_ps(group.scale), group.zero};
  }
  static Row row(const Job& job, int64_t m, int64_t s) { return _mm512_set1_ps(job.x_sums[m * job.sections + s]); }
  static Total add(const Fold& w, Row x_sum, Sum sums, Total before) {
    const __m512 value = _mm512_fnmadd_ps(_mm512_load_ps(w.zero), x_sum, _mm512_cvtepi32_ps(sums));
    return _mm512_fmadd_ps(value, w.scale, before);
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    Columns columns[kTiles];
    for (int t = 0; t < kTiles; ++t) columns[t] = load_columns(job, (tile_n + t) * kTileRows);
    write_rows<kTiles>(job, tile_n, rows, [&](int64_t m, int t) {
      return value_of_y(job, columns[t], m, load_total(totals + (m * kTiles + t) * kTileRows));
    });
  }
};

}  // namespace

void avx512::int8_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_with_zeros<Int4>(job, begin, end); }

}  // namespace qao::cpu
