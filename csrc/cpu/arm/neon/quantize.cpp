// Quantization of activations with NEON, four values at a time; see scalar/quantize.cpp.
#include <cmath>

#include "cpu/arm/simd.h"
#include "cpu/hadamard.h"
#include "cpu/quantize_kernels.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

// e^v: 2^n times a polynomial in the remainder, at most ln(2) / 2 in magnitude. Relative error 2^-23 for normal
// results.
float32x4_t exponential(float32x4_t v) {
  const float32x4_t n = vrndnq_f32(vmulq_n_f32(v, 1.44269504f));
  float32x4_t rest = vfmsq_n_f32(v, n, 0.693359375f);
  rest = vfmsq_n_f32(rest, n, -2.12194440e-4f);
  float32x4_t sum = vdupq_n_f32(1.0f / 720);
  for (const float coefficient : {1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) {
    sum = vfmaq_f32(vdupq_n_f32(coefficient), sum, rest);
  }
  // 2^n as the product of two powers, each a normal float.
  const int32x4_t whole = vcvtq_s32_f32(n), half = vshrq_n_s32(whole, 1);
  const auto power = [](int32x4_t exponent) {
    return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(exponent, vdupq_n_s32(127)), 23));
  };
  return vmulq_f32(vmulq_f32(sum, power(half)), power(vsubq_s32(whole, half)));
}

float32x4_t silu(float32x4_t x) {
  // Beyond +-100 e^v exceeds float32; NaN passes both limits.
  const float32x4_t v = vminq_f32(vmaxq_f32(vnegq_f32(x), vdupq_n_f32(-100)), vdupq_n_f32(100));
  return vdivq_f32(x, vaddq_f32(vdupq_n_f32(1), exponential(v)));
}

void values_of(const Problem& p, const Arguments& a, int64_t m, float* values) {
  float64x2_t squares[2] = {vdupq_n_f64(0), vdupq_n_f64(0)};
  for (int64_t k = 0; k < p.k; k += 4) {
    const int64_t count = p.k - k;
    float32x4_t x = load_first(a.x, m * a.x_stride + k, p.x_dtype, count);
    if (a.sum != nullptr) {
      if (a.residual != nullptr) {
        x = vaddq_f32(x, load_first(a.residual, m * a.residual_stride + k, p.x_dtype, count));
      }
      store_first(a.sum, m * p.k + k, p.x_dtype, x, count);
      x = load_first(a.sum, m * p.k + k, p.x_dtype, count);  // rounded
    }
    if (p.producer == Producer::kRmsNorm) {
      const float64x2_t low = vcvt_f64_f32(vget_low_f32(x)), high = vcvt_high_f64_f32(x);
      squares[0] = vfmaq_f64(squares[0], low, low), squares[1] = vfmaq_f64(squares[1], high, high);
      if (a.norm_weight != nullptr) x = vmulq_f32(x, load_first(a.norm_weight, k, p.norm_weight_dtype, count));
    } else if (p.producer == Producer::kSiluMul) {
      x = vmulq_f32(silu(x), load_first(a.up, m * a.up_stride + k, p.x_dtype, count));
    }
    store_first(values, k, DType::kFloat32, x, count);
  }
  if (p.producer != Producer::kRmsNorm) return;
  const double mean = vaddvq_f64(vaddq_f64(squares[0], squares[1])) / static_cast<double>(p.k);
  const float factor = static_cast<float>(1 / sqrt(mean + p.eps));
  for (int64_t k = 0; k < p.k; k += 4) {
    const float32x4_t v = load_first(values, k, DType::kFloat32, p.k - k);
    store_first(values, k, DType::kFloat32, vmulq_n_f32(v, factor), p.k - k);
  }
}

QuantizeRange range_of(Floats values, int64_t count) {
  float32x4_t low = vdupq_n_f32(0), high = low;
  uint32x4_t largest = vdupq_n_u32(0);  // bits of the magnitude: not finite from infinity's bits on
  for (int64_t k = 0; k < count; k += 4) {
    const float32x4_t v = load_first(values.data, k, values.dtype, count - k);
    low = vminnmq_f32(low, v), high = vmaxnmq_f32(high, v);
    largest = vmaxq_u32(largest, vreinterpretq_u32_f32(vabsq_f32(v)));
  }
  QuantizeRange range;
  range.low = vminnmvq_f32(low), range.high = vmaxnmvq_f32(high);
  range.finite = vmaxvq_u32(largest) < 0x7F800000;
  return range;
}

// Stores the low bytes of the first `count` words.
void store_bytes(uint32x4_t words, int64_t count, uint8_t* q) {
  const uint16x4_t halves = vmovn_u32(words);
  uint8_t bytes[8];
  vst1_u8(bytes, vmovn_u16(vcombine_u16(halves, halves)));
  std::memcpy(q, bytes, static_cast<size_t>(count < 4 ? count : 4));
}

void round_to_int8(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  for (int64_t k = 0; k < count; k += 4) {
    const float32x4_t v = load_first(values.data, k, values.dtype, count - k);
    const int32x4_t rounded = vcvtnq_s32_f32(vmulq_n_f32(v, inverse));
    const int32x4_t raised = vmaxq_s32(vaddq_s32(rounded, vdupq_n_s32(zero)), vdupq_n_s32(lowest));
    store_bytes(vreinterpretq_u32_s32(vminq_s32(raised, vdupq_n_s32(127))), count - k,
                reinterpret_cast<uint8_t*>(q) + k);
  }
}

// As to_fp8() of numeric.h.
void round_to_fp8(Floats values, int64_t count, float inverse, uint8_t* q) {
  for (int64_t k = 0; k < count; k += 4) {
    const float32x4_t scaled = vmulq_n_f32(load_first(values.data, k, values.dtype, count - k), inverse);
    const uint32x4_t bits = vreinterpretq_u32_f32(scaled), magnitude = vandq_u32(bits, vdupq_n_u32(0x7FFFFFFF));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(magnitude, 20), vdupq_n_u32(1));
    uint32x4_t code = vaddq_u32(magnitude, vaddq_u32(odd, vdupq_n_u32(0x7FFFFu - 0x3C000000u)));
    code = vshrq_n_u32(code, 20);
    const float32x4_t aligned = vaddq_f32(vreinterpretq_f32_u32(magnitude), vdupq_n_f32(0x1p14f));
    const uint32x4_t subnormal = vsubq_u32(vreinterpretq_u32_f32(aligned), vdupq_n_u32(0x46800000));
    code = vbslq_u32(vcltq_u32(magnitude, vdupq_n_u32(0x3C800000)), subnormal, code);
    code = vbslq_u32(vcgeq_u32(magnitude, vdupq_n_u32(0x43E00000)), vdupq_n_u32(0x7E), code);
    code = vbslq_u32(vcgtq_u32(magnitude, vdupq_n_u32(0x7F800000)), vdupq_n_u32(0x7F), code);
    const uint32x4_t sign = vandq_u32(vshrq_n_u32(bits, 24), vdupq_n_u32(0x80));
    store_bytes(vorrq_u32(code, sign), count - k, q + k);
  }
}

void round_to_float(const float* values, int64_t count, void* y, int64_t index, DType y_dtype) {
  for (int64_t k = 0; k < count; k += 4) {
    store_first(y, index + k, y_dtype, load_first(values, k, DType::kFloat32, count - k), count - k);
  }
}

}  // namespace

const QuantizeKernels neon::kQuantize = {values_of,    rotate_row<4>,  range_of, round_to_int8,
                                         round_to_fp8, round_to_float, &kGroups};

}  // namespace qao::cpu
