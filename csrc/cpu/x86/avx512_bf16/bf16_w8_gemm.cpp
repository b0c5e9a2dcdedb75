// 8-bit W GEMM with bfloat16 x.
// W is exact in bfloat16. Per-row and per-tensor scales multiply y. Scales of 128 x 128 blocks multiply the sums of a
// panel, which covers one block of K.
#include <type_traits>

#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/expand.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

// Converts 16 rows of four columns, lanes by pairs, to bfloat16: the first two columns, then the other two.
template <Format kFormat>
__attribute__((always_inline)) inline void widen(__m512i bytes, __m512i (&pairs)[2]) {
  kFormat == Format::kFp8 ? expand_fp8_halves(bytes, pairs) : expand_int8_halves(bytes, pairs);
}

// A block of scales covers a section and 128 rows of W; a tile has 16 of them.
struct BlockTotals : Bf16Panel {
  using Fold = float;
  using Row = float;
  static Fold fold(const Job& job, Nothing, int, int64_t tile_n, int64_t s) {
    return static_cast<const float*>(job.scales)[tile_n * kTileRows / kScaleBlock * job.sections + s];
  }
  static Row row(const Job& job, int64_t m, int64_t s) {
    return job.x_scales[m * job.x_scale_stride + s * job.x_block_stride];
  }
  static Total add(Fold w, Row x, Sum sums, Total before) {
    return _mm512_fmadd_ps(sums, _mm512_set1_ps(w * x), before);
  }
};

template <Format kFormat, bool kBlocks>
struct Bytes : std::conditional_t<kBlocks, BlockTotals, PlainTotals<Bf16Panel>>, EightBits {
  static constexpr int64_t kColumns = Bf16Panel::kColumns, kPanelColumns = Bf16Panel::kPanelColumns;

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters*, int, uint32_t* out,
                     int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      __m512i bytes[kTileRows];
      load_lanes(job, tile_n, panel * kPanelColumns + k, bytes);
      lanes_to_pairs(bytes);
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        __m512i pairs[2];
        widen<kFormat>(bytes[i], pairs);
        for (int h = 0; h < 2; ++h) _mm512_store_si512(out + (k / kColumns + 2 * i + h) * stride, pairs[h]);
      }
    }
  }

  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, !kBlocks>(job, tile_n, totals, rows, [&](int64_t tile) {
      return kBlocks ? no_scales(tile) : load_scales(job, tile * kTileRows);
    });
  }
};

}  // namespace

void avx512_bf16::bf16_w8_gemm(const Job& job, int64_t begin, int64_t end) {
  if (job.weight_format == Format::kInt8) return run_panels<Bytes<Format::kInt8, false>>(job, begin, end);
  job.weight_scaling == Scaling::kBlock ? run_panels<Bytes<Format::kFp8, true>>(job, begin, end)
                                        : run_panels<Bytes<Format::kFp8, false>>(job, begin, end);
}

}  // namespace qao::cpu
