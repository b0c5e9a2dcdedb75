// Rows of bfloat16 or fp8 x as panels of panel_gemm.h, columns in order, and for int4 W the sums of its sections.
#include "cpu/mm_kernels.h"
#include "cpu/x86/avx512/expand.h"
#include "cpu/x86/avx512_bf16/panel_bf16.h"

namespace qao::cpu {
namespace {

constexpr int64_t kVectorColumns = 32;
constexpr int kVectors = Bf16Panel::kPanelColumns / kVectorColumns;
constexpr int16_t kHugeBits = (127 + 91) << 7;  // 2^91: 2^27 such values, times 448, still have a finite sum

__m512 even_columns(__m512i pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
__m512 odd_columns(__m512i pairs) {
  return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000u))));
}

// Inf and NaN become 0; what the driver must put right is noted in `remark`.
__m512i only_finite(__m512i values, uint8_t* remark) {
  const __m512i magnitude = _mm512_and_si512(values, _mm512_set1_epi16(0x7FFF));
  const __mmask32 huge = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(kHugeBits));
  if (huge == 0) [[likely]]
    return values;
  const __mmask32 nonfinite = _mm512_cmpge_epu16_mask(magnitude, _mm512_set1_epi16(0x7F80));
  if (nonfinite != 0) *remark |= kHasNonfinite;
  if (huge != nonfinite) *remark |= kIsHuge;
  return _mm512_mask_mov_epi16(values, nonfinite, _mm512_setzero_si512());
}

// The columns of a panel from x on, of which `left` are inside.
template <bool kFp8>
__attribute__((always_inline)) inline void load_panel(const void* x, int64_t left, __m512i (&values)[kVectors]) {
  if constexpr (kFp8) {
    for (int i = 0; i < kVectors / 2; ++i) {
      const int64_t inside = left - i * kTileColumns;
      const __mmask64 mask = inside >= kTileColumns ? ~__mmask64{0} : inside <= 0 ? 0 : (__mmask64{1} << inside) - 1;
      __m512i halves[2];
      expand_fp8(_mm512_maskz_loadu_epi8(mask, static_cast<const uint8_t*>(x) + i * kTileColumns), halves);
      values[2 * i] = halves[0], values[2 * i + 1] = halves[1];
    }
  } else {
    for (int i = 0; i < kVectors; ++i) {
      const int64_t inside = left - i * kVectorColumns;
      const __mmask32 mask = inside >= kVectorColumns ? ~__mmask32{0} : inside <= 0 ? 0 : (__mmask32{1} << inside) - 1;
      values[i] = _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(x) + i * kVectorColumns);
    }
  }
}

// Inf and NaN become 0 in all of them; values are seldom so large that one must look.
void make_finite(__m512i (&values)[kVectors], uint8_t* remark) {
  __m512i largest = _mm512_setzero_si512();
  for (const __m512i& v : values) largest = _mm512_max_epu16(largest, _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF)));
  if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kHugeBits)) == 0) [[likely]]
    return;
  for (__m512i& v : values) v = only_finite(v, remark);
}

// The sums of the sections that lie in a panel, of which `left` columns are inside; sections are of so many vectors.
template <int kSection>
void sum_sections(const __m512i (&values)[kVectors], int64_t left, float* sums) {
  for (int s = 0; s < kVectors / kSection && s * kSection * kVectorColumns < left; ++s) {
    __m512 sum = _mm512_setzero_ps();
    for (int i = s * kSection; i < (s + 1) * kSection; ++i) {
      sum = _mm512_add_ps(sum, _mm512_add_ps(even_columns(values[i]), odd_columns(values[i])));
    }
    sums[s] = _mm512_reduce_add_ps(sum);
  }
}

template <bool kFp8, int kSection>
void pack(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = Bf16Panel::kPanelColumns, kBytes = kFp8 ? 1 : 2;
  for (int64_t m = begin; m < end; ++m) {
    const char* x = static_cast<const char*>(job.x) + m * job.x_stride * kBytes;
    uint32_t* panel = job.panels + m * Bf16Panel::kSteps;
    float* sums = job.x_sums + m * job.sections;
    for (int64_t k = 0; k < job.k; k += kColumns, panel += job.m * Bf16Panel::kSteps) {
      __m512i values[kVectors];
      load_panel<kFp8>(x + k * kBytes, job.k - k, values);
      if constexpr (kSection > 0) {
        make_finite(values, job.remarks + m);
        sum_sections<kSection>(values, job.k - k, sums);
        sums += kVectors / kSection;
      }
      for (int i = 0; i < kVectors; ++i) _mm512_store_si512(panel + i * 16, values[i]);
    }
  }
}

// int4 W wants its sums.
template <bool kFp8>
void pack(const Job& job, int64_t begin, int64_t end) {
  if (job.weight_format != Format::kInt4) return pack<kFp8, 0>(job, begin, end);
  switch (job.section) {
    case kVectorColumns:
      return pack<kFp8, 1>(job, begin, end);
    case 2 * kVectorColumns:
      return pack<kFp8, 2>(job, begin, end);
    default:
      return pack<kFp8, kVectors>(job, begin, end);
  }
}

}  // namespace

void avx512_bf16::pack_bf16_panels(const Job& job, int64_t begin, int64_t end) {
  job.x_format == Format::kFp8 ? pack<true>(job, begin, end) : pack<false>(job, begin, end);
}

}  // namespace qao::cpu
