// Rows of bfloat16 x as panels of panel_gemm.h, columns in order, and for int4 W the sums of its sections.
#include "cpu/mm_kernels.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

constexpr int64_t kVectorColumns = 32;
constexpr float kHuge = 0x1p91f;  // 2^27 such values, times 448, still have a finite sum

__m512 even_columns(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
__m512 odd_columns(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Inf and NaN become 0; what the driver must put right is noted in `remark`.
__m512i only_finite(__m512i values, uint8_t* remark) {
  const __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
  const __mmask32 huge = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16((127 + 91) << 7));
  if (huge == 0) [[likely]]
    return values;
  const __mmask32 nonfinite = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7F80));
  if (nonfinite != 0) *remark |= kHasNonfinite;
  if (huge != nonfinite) *remark |= kIsHuge;
  return _mm512_mask_mov_epi16(values, nonfinite, _mm512_setzero_si512());
}

}  // namespace

void avx512_bf16::pack_bf16_panels(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = Bf16Panel::kPanelColumns;
  const bool int4 = job.weight_format == Format::kInt4;
  for (int64_t m = begin; m < end; ++m) {
    const uint16_t* x = static_cast<const uint16_t*>(job.x) + m * job.x_stride;
    float* sums = int4 ? job.x_sums + m * job.sections : nullptr;
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < divide_up(job.k, kColumns) * kColumns; k += kVectorColumns) {
      const int64_t left = job.k - k;
      const __mmask32 inside = left >= kVectorColumns ? ~__mmask32{0} : left <= 0 ? 0 : ~__mmask32{0} >> (32 - left);
      __m512i values = _mm512_maskz_loadu_epi16(inside, x + k);
      if (int4) {
        values = only_finite(values, job.remarks + m);
        sum = _mm512_add_ps(sum, _mm512_add_ps(even_columns(values), odd_columns(values)));
        const int64_t next = k + kVectorColumns;
        if (left > 0 && (next % job.section == 0 || next >= job.k)) {
          sums[k / job.section] = _mm512_reduce_add_ps(sum);
          sum = _mm512_setzero_ps();
        }
      }
      uint32_t* panel = job.panels + (k / kColumns * job.m + m) * Bf16Panel::kSteps;
      _mm512_store_si512(panel + k % kColumns / Bf16Panel::kColumns, values);
    }
  }
}

}  // namespace qao::cpu
