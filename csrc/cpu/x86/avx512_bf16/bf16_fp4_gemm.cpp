// fp4 GEMM with bfloat16 x.
// A panel holds codes times their scales, which are exact in bfloat16, so sums run over all of K.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/fp4.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

struct Fp4 : PlainTotals<Bf16Panel> {
  static constexpr bool kSectioned = false;
  static constexpr int kBits = 4;
  struct Parameters {
    alignas(64) float scale[kTileRows];
  };
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Parameters* out) {
    _mm512_store_ps(out->scale, load_fp4_scales(job, tile_n, group));
  }

  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Parameters* groups, int groups_stride,
                     uint32_t* out, int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      const int64_t at = panel * kPanelColumns + k;
      __m512i quads[kTileRows];
      load_nibbles(job.weight + (tile_n * job.tiles_k + at / kTileColumns) * int4::kTileBytes, quads);
      __m512 scales[4];  // of the four k-steps
      for (int step = 0; step < 4; ++step) {
        scales[step] = _mm512_load_ps(groups[least(at + 16 * step, job.k - 1) / job.group_size * groups_stride].scale);
      }
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        const int t = i / 4, step = i % 4;
        __m512 columns[4];  // 2t, 2t + 8, 2t + 1, 2t + 9 of the step
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          const __m512 code = _mm512_permutexvar_ps(_mm512_srli_epi32(quads[i], 8 * j), fp4_values());
          columns[j] = _mm512_mul_ps(code, scales[step]);
        }
        uint32_t* pair = out + (k / kColumns + 8 * step + t) * stride;
        _mm512_store_si512(pair, as_pairs(columns[0], columns[2]));
        _mm512_store_si512(pair + 4 * stride, as_pairs(columns[1], columns[3]));
      }
    }
  }

  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, true>(job, tile_n, totals, rows, [&](int64_t tile) { return fp4_row_factors(job, tile); });
  }

 private:
  // Packs the upper halves of float32 values that have zero lower halves.
  static __m512i as_pairs(__m512 first, __m512 second) {
    return _mm512_mask_mov_epi16(_mm512_srli_epi32(_mm512_castps_si512(first), 16), 0xAAAAAAAA,
                                 _mm512_castps_si512(second));
  }
};

}  // namespace

void avx512_bf16::bf16_fp4_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Fp4>(job, begin, end); }

}  // namespace qao::cpu
