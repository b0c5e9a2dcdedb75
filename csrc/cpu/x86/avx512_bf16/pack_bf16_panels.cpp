// Packing of x as panels (panel_gemm.h), columns in order.
// x is bfloat16, fp8, or float that is rounded to fp8 here. For int4 and GGUF W it computes section sums.
#include "cpu/gemm/kernels.h"
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

// Replaces Inf and NaN by 0, and records in `remark` what the driver must fix.
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

enum class Source { kBf16, kFp8, kRoundedBf16, kRoundedFloats };
constexpr bool is_rounded(Source source) { return source == Source::kRoundedBf16 || source == Source::kRoundedFloats; }

// Combines even and odd columns that are exact in bfloat16.
__m512i as_pairs(__m512 even, __m512 odd) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

// Loads the columns of a panel from column k of row m on.
template <Source kSource>
__attribute__((always_inline)) inline void load_panel(const Job& job, int64_t m, int64_t k,
                                                      __m512i (&values)[kVectors]) {
  if constexpr (kSource == Source::kFp8) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride + k;
    for (int i = 0; i < kVectors / 2; ++i) {
      const int64_t inside = job.k - k - i * kTileColumns;
      const __mmask64 mask = inside >= kTileColumns ? ~__mmask64{0} : inside <= 0 ? 0 : (__mmask64{1} << inside) - 1;
      __m512i halves[2];
      expand_fp8(_mm512_maskz_loadu_epi8(mask, x + i * kTileColumns), halves);
      values[2 * i] = halves[0], values[2 * i + 1] = halves[1];
    }
    return;
  }
  __m512 inverse = _mm512_setzero_ps();
  if constexpr (is_rounded(kSource)) {
    const float scale = job.x_scales[m * job.x_scale_stride + k / kScaleBlock * job.x_block_stride];
    if (scale != scale) {  // the row has Inf or NaN
      for (__m512i& v : values) v = _mm512_setzero_si512();
      return;
    }
    inverse = _mm512_set1_ps(1 / scale);
  }
  const auto* x = kSource == Source::kBf16 ? static_cast<const uint16_t*>(job.x) + m * job.x_stride
                                           : static_cast<const uint16_t*>(job.floats) + m * job.floats_stride;
  for (int i = 0; i < kVectors; ++i) {
    const int64_t at = k + i * kVectorColumns, inside = job.k - at;
    if constexpr (kSource == Source::kRoundedFloats) {
      __m512i both[2];
      for (int h = 0; h < 2; ++h) {
        const int64_t index = m * job.floats_stride + at + 16 * h;
        const __m512 half = load16(job.floats, index, job.floats_dtype, first(inside - 16 * h));
        both[h] = _mm512_castps_si512(rounded_to_fp8(_mm512_mul_ps(half, inverse)));
      }
      values[i] = upper_halves(both[0], both[1]);
    } else {
      const __mmask32 mask = inside >= kVectorColumns ? ~__mmask32{0} : inside <= 0 ? 0 : (__mmask32{1} << inside) - 1;
      values[i] = _mm512_maskz_loadu_epi16(mask, x + at);
      if constexpr (kSource == Source::kRoundedBf16) {
        values[i] = as_pairs(rounded_to_fp8(_mm512_mul_ps(even_columns(values[i]), inverse)),
                             rounded_to_fp8(_mm512_mul_ps(odd_columns(values[i]), inverse)));
      }
    }
  }
}

// Prefetches those columns of a later row to L2: the hardware prefetcher stops at every page of x.
__attribute__((always_inline)) inline void fetch_panel(const Job& job, int64_t m, int64_t k) {
  constexpr int64_t kRowsAhead = 2;
  const auto* x = static_cast<const uint16_t*>(job.x) + (m + kRowsAhead) * job.x_stride + k;
  for (int i = 0; i < kVectors; ++i) __builtin_prefetch(x + i * kVectorColumns, 0, 2);
}

// Replaces Inf and NaN by 0 in all vectors. A quick check skips the usual case without large values.
void make_finite(__m512i (&values)[kVectors], uint8_t* remark) {
  __m512i largest = _mm512_setzero_si512();
  for (const __m512i& v : values) largest = _mm512_max_epu16(largest, _mm512_and_si512(v, _mm512_set1_epi16(0x7FFF)));
  if (_mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(kHugeBits)) == 0) [[likely]]
    return;
  for (__m512i& v : values) v = only_finite(v, remark);
}

// Sums the sections of a panel with `left` columns inside of K. Sections have kSection halves of a vector.
template <int kSection>
void sum_sections(const __m512i (&values)[kVectors], int64_t left, float* sums) {
  constexpr int kStep = kSection < 2 ? 1 : kSection / 2;  // vectors
  for (int i = 0; i < kVectors && i * kVectorColumns < left; i += kStep) {
    __m512 sum = _mm512_setzero_ps();
    for (int v = i; v < i + kStep; ++v) {
      sum = _mm512_add_ps(sum, _mm512_add_ps(even_columns(values[v]), odd_columns(values[v])));
    }
    if constexpr (kSection == 1) {
      sums[2 * i] = _mm512_mask_reduce_add_ps(0x00FF, sum);
      if ((2 * i + 1) * kVectorColumns / 2 < left) sums[2 * i + 1] = _mm512_mask_reduce_add_ps(0xFF00, sum);
    } else {
      sums[i / kStep] = _mm512_reduce_add_ps(sum);
    }
  }
}

template <Source kSource, int kSection>
void pack(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kColumns = Bf16Panel::kPanelColumns;
  for (int64_t m = begin; m < end; ++m) {
    uint32_t* panel = job.panels + m * Bf16Panel::kSteps;
    float* sums = job.x_sums + m * job.sections;
    for (int64_t k = 0; k < job.k; k += kColumns, panel += job.m * Bf16Panel::kSteps) {
      __m512i values[kVectors];
      if constexpr (kSource == Source::kBf16) fetch_panel(job, m, k);
      load_panel<kSource>(job, m, k, values);
      if constexpr (kSection > 0) {
        if constexpr (!is_rounded(kSource)) make_finite(values, job.remarks + m);
        sum_sections<kSection>(values, job.k - k, sums);
        sums += 2 * kVectors / kSection;
      }
      for (int i = 0; i < kVectors; ++i) _mm512_store_si512(panel + i * 16, values[i]);
    }
  }
}

// int4 and GGUF W need the section sums.
template <Source kSource>
void pack(const Job& job, int64_t begin, int64_t end) {
  if (job.weight_format != Format::kInt4 && job.weight_format != Format::kGguf) {
    return pack<kSource, 0>(job, begin, end);
  }
  switch (job.section) {
    case kVectorColumns / 2:
      return pack<kSource, 1>(job, begin, end);
    case kVectorColumns:
      return pack<kSource, 2>(job, begin, end);
    case 2 * kVectorColumns:
      return pack<kSource, 4>(job, begin, end);
    default:
      return pack<kSource, 2 * kVectors>(job, begin, end);
  }
}

}  // namespace

void avx512_bf16::pack_bf16_panels(const Job& job, int64_t begin, int64_t end) {
  if (job.floats != nullptr) {
    return job.floats_dtype == DType::kBFloat16 ? pack<Source::kRoundedBf16>(job, begin, end)
                                                : pack<Source::kRoundedFloats>(job, begin, end);
  }
  job.x_format == Format::kFp8 ? pack<Source::kFp8>(job, begin, end) : pack<Source::kBf16>(job, begin, end);
}

}  // namespace qao::cpu
