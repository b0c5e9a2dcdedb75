// GGUF GEMM of float x, with W in float32.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/float32_panel.h"
#include "cpu/x86/avx512/gguf_panel.h"

namespace qao::cpu {
namespace {

using namespace gguf;

struct Gguf : GgufPanel<Float32Panel> {
  static void expand(const Job& job, int64_t tile_n, int64_t panel, GgufScales* scales, int tiles, uint32_t* out,
                     int64_t stride) {
    with_type(job.gguf_type, [&]<Type kType> {
      using B = Blocks<kType>;
      expand_unit<kType>(
          job, tile_n, panel / kPanelsAtOnce, tiles, scales, [](auto& lanes) { lanes_to_quads(lanes); },
          [&](int segment, int i, __m512i codes) __attribute__((always_inline)) {
            const int section = segment / (scale_columns(kType) / kSegment) * (scale_columns(kType) / kSegment);
            const __m512 scale = _mm512_load_ps(scales->scale[section]);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
              const __m512i code = _mm512_and_si512(_mm512_srli_epi32(codes, 8 * j), _mm512_set1_epi32(0xFF));
              __m512 w =
                  _mm512_mul_ps(scale, _mm512_cvtepi32_ps(_mm512_sub_epi32(code, _mm512_set1_epi32(B::kOffset))));
              if constexpr (B::kHasMinima) w = _mm512_sub_ps(w, _mm512_load_ps(scales->minimum[section]));
              store_floats(out + (kSegment * segment + 4 * i + j) * stride, w);
            }
          });
    });
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, false>(job, tile_n, totals, rows, no_scales);
  }
};

}  // namespace

void avx512::float32_gguf_gemm(const Job& job, int64_t begin, int64_t end) { run_panels<Gguf>(job, begin, end); }

}  // namespace qao::cpu
