// Quantization of activations with AVX-512, sixteen values at a time; see scalar/quantize.cpp.
#include <cmath>

#include "cpu/hadamard.h"
#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

// Calls task(k, mask) for sixteen values at a time. The mask excludes those past the end; it is constant before that.
template <typename Task>
__attribute__((always_inline)) inline void for_each16(int64_t count, const Task& task) {
  int64_t k = 0;
  for (; k + 16 <= count; k += 16) task(k, __mmask16{0xFFFF});
  if (k < count) task(k, first(count - k));
}

__m512 silu(__m512 x) {
  // Beyond +-100 e^v exceeds float32; NaN passes both limits.
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

// Calls `visit` with the dtype as a template argument.
template <typename Visit>
__attribute__((always_inline)) inline auto with_dtype(DType dtype, const Visit& visit) {
  if (dtype == DType::kBFloat16) return visit.template operator()<DType::kBFloat16>();
  if (dtype == DType::kFloat16) return visit.template operator()<DType::kFloat16>();
  return visit.template operator()<DType::kFloat32>();
}

// Finds the range by integer comparison of bits: positive floats order like signed integers, and the lowest negative
// float has the largest unsigned integer. Infinity and NaN lie beyond all others.
template <DType kDType>
QuantizeRange range_of_bits(const void* values, int64_t count) {
  constexpr bool kWide = kDType == DType::kFloat32;
  constexpr int kChains = 2, kValues = kWide ? 16 : 32;
  constexpr uint32_t kInfinity = kWide ? 0x7F800000 : kDType == DType::kBFloat16 ? 0x7F80 : 0x7C00;
  constexpr uint32_t kSign = kWide ? 0x80000000 : 0x8000;
  __m512i high[kChains], low[kChains];
  for (int c = 0; c < kChains; ++c) high[c] = low[c] = _mm512_setzero_si512();
  const auto add = [&](int c, __m512i v) {
    high[c] = kWide ? _mm512_max_epi32(high[c], v) : _mm512_max_epi16(high[c], v);
    low[c] = kWide ? _mm512_max_epu32(low[c], v) : _mm512_max_epu16(low[c], v);
  };
  const char* bytes = static_cast<const char*>(values);
  int64_t k = 0;
  for (; k + kChains * kValues <= count; k += kChains * kValues, bytes += kChains * 64) {
#pragma GCC unroll 2
    for (int c = 0; c < kChains; ++c) add(c, _mm512_loadu_si512(bytes + 64 * c));
  }
  for (; k < count; k += kValues, bytes += 64) {
    const int64_t left = count - k;
    const __mmask32 halves = left >= 32 ? ~__mmask32{0} : (__mmask32{1} << left) - 1;
    add(0, kWide ? _mm512_maskz_loadu_epi32(first(left), bytes) : _mm512_maskz_loadu_epi16(halves, bytes));
  }
  uint32_t highest, lowest;
  if constexpr (kWide) {
    highest = static_cast<uint32_t>(_mm512_reduce_max_epi32(_mm512_max_epi32(high[0], high[1])));
    lowest = _mm512_reduce_max_epu32(_mm512_max_epu32(low[0], low[1]));
  } else {
    // Reduces both halves of each word, as words.
    const __m512i highs = _mm512_max_epi16(high[0], high[1]), lows = _mm512_max_epu16(low[0], low[1]);
    highest = static_cast<uint32_t>(_mm512_reduce_max_epi32(
        _mm512_max_epi32(_mm512_srli_epi32(highs, 16), _mm512_and_si512(highs, _mm512_set1_epi32(0xFFFF)))));
    lowest = _mm512_reduce_max_epu32(
        _mm512_max_epu32(_mm512_srli_epi32(lows, 16), _mm512_and_si512(lows, _mm512_set1_epi32(0xFFFF))));
  }
  const auto value = [](uint32_t bits) {
    const uint16_t half = static_cast<uint16_t>(bits);
    return kWide ? bits_to_float(bits) : kDType == DType::kBFloat16 ? from_bf16(half) : from_fp16(half);
  };
  if (highest >= kInfinity || lowest >= (kSign | kInfinity)) return {0, 0, false};
  return {lowest >= kSign ? value(lowest) : 0, value(highest), true};
}

QuantizeRange range_of(Floats values, int64_t count) {
  return with_dtype(values.dtype, [&]<DType kDType>() { return range_of_bits<kDType>(values.data, count); });
}

// Rounds sixteen values to integers.
__m512i rounded_sixteen(__m512 values, __m512 inverse) { return _mm512_cvtps_epi32(_mm512_mul_ps(values, inverse)); }

template <DType kDType>
void round_row_to_int8(const void* values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  const __m512 factor = _mm512_set1_ps(inverse);
  const __m512i zeros = _mm512_set1_epi16(static_cast<int16_t>(zero)),
                least = _mm512_set1_epi8(static_cast<int8_t>(lowest));
  int64_t k = 0;
  if constexpr (kDType == DType::kBFloat16) {
    // Even and odd values separately, then 16-bit words in order: integers lie within 255 of 0.
    const auto words = [&](const char* from) __attribute__((always_inline)) {
      const __m512i both = _mm512_loadu_si512(from);
      const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
      const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
      const __m512i high = _mm512_slli_epi32(rounded_sixteen(odd, factor), 16);
      return _mm512_adds_epi16(_mm512_mask_blend_epi16(0xAAAAAAAA, rounded_sixteen(even, factor), high), zeros);
    };
    const __m512i order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    for (; k + 64 <= count; k += 64) {
      const char* from = static_cast<const char*>(values) + 2 * k;
      const __m512i bytes = _mm512_packs_epi16(words(from), words(from + 64));
      _mm512_storeu_si512(q + k, _mm512_max_epi8(_mm512_permutexvar_epi64(order, bytes), least));
    }
  }
  for (; k < count; k += 16) {
    const __mmask16 mask = first(count - k);
    const __m512i rounded = rounded_sixteen(load16(values, k, kDType, mask), factor);
    const __m128i bytes = _mm512_cvtsepi32_epi8(_mm512_add_epi32(rounded, _mm512_set1_epi32(zero)));
    _mm_mask_storeu_epi8(q + k, mask, _mm_max_epi8(bytes, _mm512_castsi512_si128(least)));
  }
}

void round_to_int8(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  with_dtype(values.dtype,
             [&]<DType kDType>() { round_row_to_int8<kDType>(values.data, count, inverse, zero, lowest, q); });
}

// As to_fp8() of numeric.h.
template <DType kDType>
void round_row_to_fp8(const void* values, int64_t count, float inverse, uint8_t* q) {
  for_each16(count, [&](int64_t k, __mmask16 mask) {
    const __m512 scaled = _mm512_mul_ps(load16(values, k, kDType, mask), _mm512_set1_ps(inverse));
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

void round_to_fp8(Floats values, int64_t count, float inverse, uint8_t* q) {
  with_dtype(values.dtype, [&]<DType kDType>() { round_row_to_fp8<kDType>(values.data, count, inverse, q); });
}

void round_to_float(const float* values, int64_t count, void* y, int64_t index, DType y_dtype) {
  for_each16(count, [&](int64_t k, __mmask16 mask) {
    store16(y, index + k, y_dtype, _mm512_maskz_loadu_ps(mask, values + k), mask);
  });
}

}  // namespace

const QuantizeKernels avx512::kQuantize = {values_of,    rotate_row<16>, range_of, round_to_int8,
                                           round_to_fp8, round_to_float, &kGroups};

}  // namespace qao::cpu
