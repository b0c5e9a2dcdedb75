// NEON loads, stores and conversions, four values at a time. `static`: see numeric.h.
#pragma once

#include <arm_neon.h>

#include "cpu/numeric.h"

namespace qao::cpu {

// Loads data[index .. index + 4) as float32.
static inline float32x4_t load4(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return vld1q_f32(static_cast<const float*>(data) + index);
  const uint16x4_t half = vld1_u16(static_cast<const uint16_t*>(data) + index);
  if (dtype == DType::kFloat16) return vcvt_f32_f16(vreinterpret_f16_u16(half));
  return vreinterpretq_f32_u32(vshll_n_u16(half, 16));
}

// Loads the first `count` values, 0 for the others; reads no further.
static inline float32x4_t load_first(const void* data, int64_t index, DType dtype, int64_t count) {
  if (count >= 4) return load4(data, index, dtype);
  float values[4] = {};
  for (int64_t i = 0; i < count; ++i) values[i] = load(data, index + i, dtype);
  return vld1q_f32(values);
}

static inline uint16x4_t to_bf16(float32x4_t value) {
  const uint32x4_t bits = vreinterpretq_u32_f32(value);
  const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  const uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7FFF)), odd);
  const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x00400000));
  return vshrn_n_u32(vbslq_u32(vceqq_f32(value, value), rounded, quiet), 16);
}

// Stores the first `count` (at most 4) values to data[index .. index + count).
static inline void store_first(void* data, int64_t index, DType dtype, float32x4_t value, int64_t count) {
  if (count < 4) {
    float values[4];
    vst1q_f32(values, value);
    for (int64_t i = 0; i < count; ++i) store(data, index + i, dtype, values[i]);
  } else if (dtype == DType::kFloat32) {
    vst1q_f32(static_cast<float*>(data) + index, value);
  } else {
    const uint16x4_t half = dtype == DType::kFloat16 ? vreinterpret_u16_f16(vcvt_f16_f32(value)) : to_bf16(value);
    vst1_u16(static_cast<uint16_t*>(data) + index, half);
  }
}

// Converts eight e4m3 to float32, exactly, in order: a float16 with a short mantissa, except for the exponent bias
// (2^-8 of the value) and NaN.
static inline void expand_fp8(uint8x8_t bytes, float32x4_t (&out)[2]) {
  const uint16x8_t wide = vshll_n_u8(bytes, 7);
  const uint16x8_t sign = vshlq_n_u16(vandq_u16(wide, vdupq_n_u16(0x4000)), 1), magnitude = vdupq_n_u16(0x3F80);
  const uint16x8_t value = vandq_u16(wide, magnitude);
  const uint16x8_t nan = vandq_u16(vceqq_u16(value, magnitude), vdupq_n_u16(0x7C00));
  const float16x8_t half = vreinterpretq_f16_u16(vorrq_u16(vorrq_u16(value, sign), nan));
  out[0] = vmulq_n_f32(vcvt_f32_f16(vget_low_f16(half)), 256);
  out[1] = vmulq_n_f32(vcvt_high_f32_f16(half), 256);
}

static inline void expand_int8(uint8x8_t bytes, float32x4_t (&out)[2]) {
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u8(bytes));
  out[0] = vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
  out[1] = vcvtq_f32_s32(vmovl_high_s16(wide));
}

}  // namespace qao::cpu
