// int4 GEMM with bfloat16 x.
// A panel holds q - whole, exact in bfloat16. `whole` is the zero point if that is an integer in 0..15, so that weights
// of 0 contribute nothing to any sum. Every section ends with
//   total += scale * (sums + (whole - zero) * sum(x)).
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

// Parameters of a group of 16 rows of W.
struct Group {
  alignas(64) float scale[kTileRows];
  float rest[kTileRows];      // whole - zero
  uint32_t whole[kTileRows];  // in each byte
  bool has_rest;
};

// Integers -16..15 as bfloat16, indexed by their low five bits.
struct Bf16Table {
  alignas(64) uint16_t values[32];
};
constexpr Bf16Table kNumbers = [] {
  Bf16Table table = {};
  for (int i = 0; i < 32; ++i) {
    const int number = i < 16 ? i : i - 32, magnitude = number < 0 ? -number : number;
    int log2 = 0;
    while (magnitude >> log2 > 1) ++log2;
    const int bits = number == 0 ? 0 : (127 + log2) << 7 | (magnitude << (7 - log2) & 0x7F);
    table.values[i] = static_cast<uint16_t>(bits | (number < 0 ? 0x8000 : 0));
  }
  return table;
}();

struct Int4 : Bf16Panel {
  using Parameters = Group;
  static constexpr int kBits = 4;

  static void prepare(const Job& job, int64_t tile_n, int64_t group, Group* out) {
    const GroupVectors of_rows = load_group(job, tile_n, group);
    const __m512 in_range = _mm512_max_ps(_mm512_min_ps(of_rows.zero, _mm512_set1_ps(15)), _mm512_setzero_ps());
    const __m512 whole = _mm512_roundscale_ps(in_range, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(whole, of_rows.zero);
    _mm512_store_ps(out->scale, of_rows.scale);
    _mm512_store_ps(out->rest, rest);
    _mm512_store_si512(out->whole, _mm512_mullo_epi32(_mm512_cvtps_epi32(whole), _mm512_set1_epi32(0x01010101)));
    out->has_rest = _mm512_cmp_ps_mask(rest, _mm512_setzero_ps(), _CMP_NEQ_UQ) != 0;
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Group* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      const int64_t tile_k = panel * (kPanelColumns / kTileColumns) + k / kTileColumns;
      const uint8_t* weight = job.weight + (tile_n * job.tiles_k + tile_k) * int4::kTileBytes;
      __m512i quads[kTileRows];
      load_nibbles(weight, quads);
      const __m512i numbers = _mm512_load_si512(kNumbers.values);
      const int64_t at = panel * kPanelColumns + k;
      const __m512i whole[2] = {
          _mm512_load_si512(groups[at / job.group_size * groups_stride].whole),
          _mm512_load_si512(groups[least(at + 32, job.k - 1) / job.group_size * groups_stride].whole)};
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        const int t = i / 4, step = i % 4;
        const __m512i differences = _mm512_sub_epi8(quads[i], whole[step / 2]);
        uint32_t* pair = out + (k / kColumns + 8 * step + t) * stride;
        _mm512_store_si512(pair, _mm512_permutexvar_epi16(differences, numbers));
        _mm512_store_si512(pair + 4 * stride, _mm512_permutexvar_epi16(_mm512_srli_epi16(differences, 8), numbers));
      }
    }
  }

  static constexpr bool kHasRests = true;
  using Fold = __m512;  // scales
  struct Row {
    const float* x_sum;
  };
  static bool has_rest(const Group& group) { return group.has_rest; }
  static Row row(const Job& job, int64_t m, int64_t s) { return {job.x_sums + m * job.sections + s}; }
  static Sum add_rest(const Group& group, Row x, Sum sums) {
    return _mm512_fmadd_ps(_mm512_load_ps(group.rest), _mm512_set1_ps(*x.x_sum), sums);
  }
  static Fold fold(const Job&, const Group& group, int, int64_t, int64_t) { return _mm512_load_ps(group.scale); }
  static Total add(Fold scales, Row, Sum sums, Total before) { return _mm512_fmadd_ps(sums, scales, before); }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, true>(job, tile_n, totals, rows, no_scales);
  }
};

}  // namespace

void avx512_bf16::bf16_int4_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Int4>(job, begin, end); }

}  // namespace qao::cpu
