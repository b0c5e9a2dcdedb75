// Sixteen values at a time; see quantize_scalar.cpp.
#include <cmath>

#include "cpu/quantize_kernels.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

// task(k, mask) for sixteen values after the other, the mask leaving out those past the end; a constant but at the end.
template <typename Task>
__attribute__((always_inline)) inline void for_each16(int64_t count, const Task& task) {
  int64_t k = 0;
  for (; k + 16 <= count; k += 16) task(k, __mmask16{0xFFFF});
  if (k < count) task(k, first(count - k));
}

// e^v: 2^n times a polynomial in the rest, at most ln(2) / 2 in magnitude. Relative error 2^-23.
__m512 exponential(__m512 v) {
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(v, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), v);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), rest);
  __m512 sum = _mm512_set1_ps(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(coefficient));
  }
  return _mm512_scalef_ps(sum, n);
}

__m512 silu(__m512 x) {
  // Beyond +-100 float32 holds e^v no longer; NaN passes both limits.
  const __m512 v = _mm512_max_ps(_mm512_set1_ps(-100), _mm512_sub_ps(_mm512_setzero_ps(), x));
  return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1), exponential(_mm512_min_ps(_mm512_set1_ps(100), v))));
}

void values_of(const Problem& p, const Arguments& a, int64_t m, float* values) {
  __m512d squares[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()};
  for_each16(p.k, [&](int64_t k, __mmask16 mask) {
    __m512 x = load16(a.x, m * a.x_stride + k, p.x_dtype, mask);
    if (a.sum != nullptr) {
      if (a.residual != nullptr) {
        x = _mm512_add_ps(x, load16(a.residual, m * a.residual_stride + k, p.x_dtype, mask));
      }
      store16(a.sum, m * p.k + k, p.x_dtype, x, mask);
      x = load16(a.sum, m * p.k + k, p.x_dtype, mask);  // rounded
    }
    if (p.producer == Producer::kRmsNorm) {
      const __m512d low = _mm512_cvtps_pd(_mm512_castps512_ps256(x)),
                    high = _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
      squares[0] = _mm512_fmadd_pd(low, low, squares[0]);
      squares[1] = _mm512_fmadd_pd(high, high, squares[1]);
      if (a.norm_weight != nullptr) x = _mm512_mul_ps(x, load16(a.norm_weight, k, p.norm_weight_dtype, mask));
    } else if (p.producer == Producer::kSiluMul) {
      x = _mm512_mul_ps(silu(x), load16(a.up, m * a.up_stride + k, p.x_dtype, mask));
    }
    _mm512_mask_storeu_ps(values + k, mask, x);
  });
  if (p.producer != Producer::kRmsNorm) return;
  const double mean = _mm512_reduce_add_pd(_mm512_add_pd(squares[0], squares[1])) / static_cast<double>(p.k);
  const __m512 factor = _mm512_set1_ps(static_cast<float>(1 / sqrt(mean + p.eps)));
  for_each16(p.k, [&](int64_t k, __mmask16 mask) {
    _mm512_mask_storeu_ps(values + k, mask, _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, values + k), factor));
  });
}

QuantizeRange range_of(const float* values, int64_t count) {
  constexpr int kChains = 4;  // a minimum takes four cycles, and two start in each
  const __m512i magnitude = _mm512_set1_epi32(0x7FFFFFFF);
  __m512 low[kChains], high[kChains];
  __m512i largest[kChains];  // bits of the magnitude: from those of infinity on not finite
  for (int c = 0; c < kChains; ++c) low[c] = high[c] = _mm512_setzero_ps(), largest[c] = _mm512_setzero_si512();
  const auto add = [&](int c, __m512 v) {
    low[c] = _mm512_min_ps(low[c], v), high[c] = _mm512_max_ps(high[c], v);
    largest[c] = _mm512_max_epi32(largest[c], _mm512_and_si512(_mm512_castps_si512(v), magnitude));
  };
  int64_t k = 0;
  for (; k + 16 * kChains <= count; k += 16 * kChains) {
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) add(c, _mm512_loadu_ps(values + k + 16 * c));
  }
  for (; k < count; k += 16) add(0, _mm512_maskz_loadu_ps(first(count - k), values + k));
  for (int c = 1; c < kChains; ++c) {
    low[0] = _mm512_min_ps(low[0], low[c]), high[0] = _mm512_max_ps(high[0], high[c]);
    largest[0] = _mm512_max_epi32(largest[0], largest[c]);
  }
  return {_mm512_reduce_min_ps(low[0]), _mm512_reduce_max_ps(high[0]),
          _mm512_reduce_max_epi32(largest[0]) < 0x7F800000};
}

void round_to_int8(const float* values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  for_each16(count, [&](int64_t k, __mmask16 mask) {
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, values + k), _mm512_set1_ps(inverse));
    const __m512i rounded = _mm512_add_epi32(_mm512_cvtps_epi32(scaled), _mm512_set1_epi32(zero));
    const __m512i raised = _mm512_max_epi32(rounded, _mm512_set1_epi32(lowest));
    _mm_mask_storeu_epi8(q + k, mask, _mm512_cvtsepi32_epi8(raised));
  });
}

// to_fp8() of numeric.h.
void round_to_fp8(const float* values, int64_t count, float inverse, uint8_t* q) {
  for_each16(count, [&](int64_t k, __mmask16 mask) {
    const __m512 scaled = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, values + k), _mm512_set1_ps(inverse));
    const __m512i bits = _mm512_castps_si512(scaled);
    const __m512i magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF));
    const __mmask16 odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(1 << 20));
    __m512i code = _mm512_add_epi32(magnitude, _mm512_set1_epi32(0x7FFFF - 0x3C000000));
    code = _mm512_srli_epi32(_mm512_mask_add_epi32(code, odd, code, _mm512_set1_epi32(1)), 20);
    const __m512 aligned = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_set1_ps(0x1p14f));
    code = _mm512_mask_sub_epi32(code, _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3C800000)),
                                 _mm512_castps_si512(aligned), _mm512_set1_epi32(0x46800000));
    code = _mm512_min_epu32(code, _mm512_set1_epi32(0x7E));
    code = _mm512_mask_mov_epi32(code, _mm512_cmp_ps_mask(scaled, scaled, _CMP_UNORD_Q), _mm512_set1_epi32(0x7F));
    const __m512i sign = _mm512_srli_epi32(bits, 24);
    code = _mm512_ternarylogic_epi32(sign, _mm512_set1_epi32(0x80), code, 0xEA);  // (sign & 0x80) | code
    _mm_mask_storeu_epi8(q + k, mask, _mm512_cvtepi32_epi8(code));
  });
}

void round_to_float(const float* values, int64_t count, void* y, int64_t index, DType y_dtype) {
  for_each16(count, [&](int64_t k, __mmask16 mask) {
    store16(y, index + k, y_dtype, _mm512_maskz_loadu_ps(mask, values + k), mask);
  });
}

}  // namespace

const QuantizeKernels avx512::kQuantize = {values_of,    range_of,       round_to_int8,
                                           round_to_fp8, round_to_float, quantize_group};

}  // namespace qao::cpu
