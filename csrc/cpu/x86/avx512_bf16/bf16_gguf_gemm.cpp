// GGUF GEMM with bfloat16 x.
// A panel holds code - offset, exact in bfloat16. Every section of 16 or 32 columns, which have one scale, ends with
//   total += scale * sums - minimum * sum(x).
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/expand.h"
#include "cpu/x86/avx512/gguf_panel.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

using namespace gguf;

// The two bytes of code - kOffset as bfloat16, for codes of up to six bits.
struct CodeTable {
  alignas(64) uint8_t low[64], high[64];
};
template <int kOffset>
constexpr CodeTable kNumbers = [] {
  CodeTable table = {};
  for (int code = 0; code < 64; ++code) {
    const int number = code - kOffset, magnitude = number < 0 ? -number : number;
    const int bits = (kInt8Table.high[magnitude] | (number < 0 ? 0x80 : 0)) << 8 | kInt8Table.low[magnitude];
    table.low[code] = static_cast<uint8_t>(bits & 0xFF), table.high[code] = static_cast<uint8_t>(bits >> 8);
  }
  return table;
}();

// Converts 16 rows of four columns, lanes by pairs: the first two columns, then the other two.
template <int kOffset>
__attribute__((always_inline)) inline void widen(__m512i codes, __m512i (&pairs)[2]) {
  if constexpr (kOffset == 128) {
    return expand_int8_halves(_mm512_xor_si512(codes, _mm512_set1_epi8(-128)), pairs);
  } else {
    const __m512i low = _mm512_permutexvar_epi8(codes, _mm512_load_si512(kNumbers<kOffset>.low));
    const __m512i high = _mm512_permutexvar_epi8(codes, _mm512_load_si512(kNumbers<kOffset>.high));
    pairs[0] = _mm512_unpacklo_epi8(low, high), pairs[1] = _mm512_unpackhi_epi8(low, high);
  }
}

template <bool kHasMinima>
struct Gguf : GgufPanel<Bf16Panel> {
  static constexpr bool kHasShortSections = true;

  static void expand(const Job& job, int64_t tile_n, int64_t panel, GgufScales* scales, int tiles, uint32_t* out,
                     int64_t stride) {
    with_type(job.gguf_type, [&]<Type kType> {
      if constexpr (Blocks<kType>::kHasMinima == kHasMinima) {
        expand_unit<kType>(
            job, tile_n, panel / kPanelsAtOnce, tiles, scales, [](auto& lanes) { lanes_to_pairs(lanes); },
            [&](int segment, int i, __m512i codes) __attribute__((always_inline)) {
              __m512i pairs[2];
              widen<Blocks<kType>::kOffset>(codes, pairs);
              for (int h = 0; h < 2; ++h) _mm512_store_si512(out + (8 * segment + 2 * i + h) * stride, pairs[h]);
            });
      }
    });
  }

  struct Fold {
    const float *scale, *minimum;
  };
  using Row = float;  // sum of x
  static Fold fold(const Job& job, const GgufScales& scales, int, int64_t, int64_t s) {
    const int64_t at = s * job.section / kSegment % kUnitSegments;
    return {scales.scale[at], scales.minimum[at]};
  }
  static Row row(const Job& job, int64_t m, int64_t s) { return job.x_sums[m * job.sections + s]; }
  static Total add(Fold fold, Row x_sum, Sum sums, Total before) {
    const Total total = _mm512_fmadd_ps(sums, _mm512_load_ps(fold.scale), before);
    if constexpr (!kHasMinima) return total;
    return _mm512_fnmadd_ps(_mm512_load_ps(fold.minimum), _mm512_set1_ps(x_sum), total);
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    write_tiles<kTiles, false>(job, tile_n, totals, rows, no_scales);
  }
};

}  // namespace

void avx512_bf16::bf16_gguf_gemm(const Job& job, int64_t begin, int64_t end) {
  const bool has_minima = with_type(job.gguf_type, []<Type kType> { return Blocks<kType>::kHasMinima; });
  has_minima ? run_panels<Gguf<true>>(job, begin, end) : run_panels<Gguf<false>>(job, begin, end);
}

}  // namespace qao::cpu
