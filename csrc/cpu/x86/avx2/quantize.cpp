// Quantization of activations with AVX2, eight values at a time; see scalar/quantize.cpp.
#include <cmath>

#include "cpu/hadamard.h"
#include "cpu/quantize_kernels.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

__m256 silu(__m256 x) {
  // Beyond +-100 e^v exceeds float32; NaN passes both limits.
  const __m256 v = _mm256_max_ps(_mm256_set1_ps(-100), _mm256_sub_ps(_mm256_setzero_ps(), x));
  return _mm256_div_ps(x, _mm256_add_ps(_mm256_set1_ps(1), exponential(_mm256_min_ps(_mm256_set1_ps(100), v))));
}

__m256d add_squares(__m256d sum, __m128 x) {
  const __m256d wide = _mm256_cvtps_pd(x);
  return _mm256_fmadd_pd(wide, wide, sum);
}

void values_of(const Problem& p, const Arguments& a, int64_t m, float* values) {
  __m256d squares[2] = {_mm256_setzero_pd(), _mm256_setzero_pd()};
  for (int64_t k = 0; k < p.k; k += 8) {
    __m256 x = load_first(a.x, m * a.x_stride + k, p.x_dtype, p.k - k);
    if (a.sum != nullptr) {
      if (a.residual != nullptr) {
        x = _mm256_add_ps(x, load_first(a.residual, m * a.residual_stride + k, p.x_dtype, p.k - k));
      }
      store_first(a.sum, m * p.k + k, p.x_dtype, x, p.k - k);
      x = load_first(a.sum, m * p.k + k, p.x_dtype, p.k - k);  // rounded
    }
    if (p.producer == Producer::kRmsNorm) {
      squares[0] = add_squares(squares[0], _mm256_castps256_ps128(x));
      squares[1] = add_squares(squares[1], _mm256_extractf128_ps(x, 1));
      if (a.norm_weight != nullptr) {
        x = _mm256_mul_ps(x, load_first(a.norm_weight, k, p.norm_weight_dtype, p.k - k));
      }
    } else if (p.producer == Producer::kSiluMul) {
      x = _mm256_mul_ps(silu(x), load_first(a.up, m * a.up_stride + k, p.x_dtype, p.k - k));
    }
    store_first(values, k, DType::kFloat32, x, p.k - k);
  }
  if (p.producer != Producer::kRmsNorm) return;
  alignas(32) double sums[4];
  _mm256_store_pd(sums, _mm256_add_pd(squares[0], squares[1]));
  const double mean = ((sums[0] + sums[1]) + (sums[2] + sums[3])) / static_cast<double>(p.k);
  const __m256 factor = _mm256_set1_ps(static_cast<float>(1 / sqrt(mean + p.eps)));
  for (int64_t k = 0; k < p.k; k += 8) {
    const __m256 v = load_first(values, k, DType::kFloat32, p.k - k);
    store_first(values, k, DType::kFloat32, _mm256_mul_ps(v, factor), p.k - k);
  }
}

QuantizeRange range_of(Floats values, int64_t count) {
  const __m256i magnitude = _mm256_set1_epi32(0x7FFFFFFF);
  __m256 low = _mm256_setzero_ps(), high = low;
  __m256i largest = _mm256_setzero_si256();  // bits of the magnitude: not finite from infinity's bits on
  for (int64_t k = 0; k < count; k += 8) {
    const __m256 v = load_first(values.data, k, values.dtype, count - k);
    low = _mm256_min_ps(low, v), high = _mm256_max_ps(high, v);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(_mm256_castps_si256(v), magnitude));
  }
  alignas(32) float lows[8], highs[8];
  _mm256_store_ps(lows, low), _mm256_store_ps(highs, high);
  QuantizeRange range;
  for (int i = 0; i < 8; ++i) {
    range.low = lows[i] < range.low ? lows[i] : range.low;
    range.high = highs[i] > range.high ? highs[i] : range.high;
  }
  range.finite = _mm256_movemask_epi8(_mm256_cmpgt_epi32(_mm256_set1_epi32(0x7F800000), largest)) == -1;
  return range;
}

// Stores the low bytes of the first `count` words, each -128..127 or 0..255.
void store_bytes(__m256i words, int64_t count, uint8_t* q) {
  const __m256i order =
      _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1));
  const __m256i packed = _mm256_shuffle_epi8(words, order);
  const __m128i bytes = _mm_unpacklo_epi32(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
  uint64_t all = static_cast<uint64_t>(_mm_cvtsi128_si64(bytes));
  if (count >= 8) {
    std::memcpy(q, &all, 8);
  } else {
    for (int64_t i = 0; i < count; ++i, all >>= 8) q[i] = static_cast<uint8_t>(all);
  }
}

void round_to_int8(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  for (int64_t k = 0; k < count; k += 8) {
    const __m256 v = load_first(values.data, k, values.dtype, count - k);
    const __m256i rounded = _mm256_cvtps_epi32(_mm256_mul_ps(v, _mm256_set1_ps(inverse)));
    const __m256i raised =
        _mm256_max_epi32(_mm256_add_epi32(rounded, _mm256_set1_epi32(zero)), _mm256_set1_epi32(lowest));
    store_bytes(_mm256_min_epi32(raised, _mm256_set1_epi32(127)), count - k, reinterpret_cast<uint8_t*>(q) + k);
  }
}

// As to_fp8() of numeric.h.
void round_to_fp8(Floats values, int64_t count, float inverse, uint8_t* q) {
  for (int64_t k = 0; k < count; k += 8) {
    const __m256 scaled = _mm256_mul_ps(load_first(values.data, k, values.dtype, count - k), _mm256_set1_ps(inverse));
    const __m256i bits = _mm256_castps_si256(scaled);
    const __m256i magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7FFFFFFF));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(magnitude, 20), _mm256_set1_epi32(1));
    __m256i code = _mm256_add_epi32(magnitude, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFFF - 0x3C000000)));
    code = _mm256_srli_epi32(code, 20);
    const __m256 aligned = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_set1_ps(0x1p14f));
    const __m256i subnormal = _mm256_sub_epi32(_mm256_castps_si256(aligned), _mm256_set1_epi32(0x46800000));
    code = _mm256_blendv_epi8(code, subnormal, _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3C800000), magnitude));
    const __m256i large = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x43E00000 - 1));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7E), large);
    const __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7F800000));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(0x7F), nan);
    const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    store_bytes(_mm256_or_si256(code, sign), count - k, q + k);
  }
}

void round_to_float(const float* values, int64_t count, void* y, int64_t index, DType y_dtype) {
  for (int64_t k = 0; k < count; k += 8) {
    store_first(y, index + k, y_dtype, load_first(values, k, DType::kFloat32, count - k), count - k);
  }
}

}  // namespace

const QuantizeKernels avx2::kQuantize = {values_of,    rotate_row<8>,  range_of, round_to_int8,
                                         round_to_fp8, round_to_float, &kGroups};

}  // namespace qao::cpu
