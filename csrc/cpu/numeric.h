// Scalar conversions of float32 to and from bfloat16, float16 and fp8, round to nearest even.
// Everything is `static`: the linker must not choose a copy compiled for a newer ISA for all files.
#pragma once

#include <cstdint>
#include <cstring>

#include "qao/types.h"

namespace qao::cpu {

static inline float bits_to_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}
static inline uint32_t float_to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

static inline float from_bf16(uint16_t value) { return bits_to_float(static_cast<uint32_t>(value) << 16); }
static inline uint16_t to_bf16(float value) {
  const uint32_t bits = float_to_bits(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x0040);  // quiet NaN
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

static inline float from_fp16(uint16_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x8000) << 16;
  const uint32_t magnitude = value & 0x7FFF;
  if (magnitude >= 0x7C00) return bits_to_float(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  // Moves the exponent to float32's; the multiplication also normalizes subnormals.
  return bits_to_float(float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f) | sign);
}
static inline uint16_t to_fp16(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // rounds past 65504
  if (magnitude < 0x38800000) {                       // subnormal: adding 0.5 aligns and rounds the mantissa
    return static_cast<uint16_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3F000000));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

// e4m3: four exponent bits, three mantissa bits, no infinity; 0x7F is NaN.
static inline float from_fp8(uint8_t value) {
  const uint32_t sign = static_cast<uint32_t>(value & 0x80) << 24;
  const uint32_t magnitude = value & 0x7F;
  if (magnitude == 0x7F) return bits_to_float(0x7FC00000 | sign);
  // Moves the exponent to float32's; the multiplication also normalizes subnormals.
  return bits_to_float(float_to_bits(bits_to_float(magnitude << 20) * 0x1p120f) | sign);
}
// Saturates at 448.
static inline uint8_t to_fp8(float value) {
  const uint32_t bits = float_to_bits(value);
  const uint8_t sign = static_cast<uint8_t>(bits >> 24 & 0x80);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7F;
  if (magnitude >= 0x43E00000) return sign | 0x7E;  // 448 and more
  if (magnitude < 0x3C800000) {                     // subnormal: adding 2^14 aligns and rounds the mantissa
    return static_cast<uint8_t>(sign | (float_to_bits(bits_to_float(magnitude) + 0x1p14f) - 0x46800000));
  }
  return static_cast<uint8_t>(sign | ((magnitude - 0x3C000000 + 0x7FFFF + (magnitude >> 20 & 1)) >> 20));
}

static inline float load(const void* data, int64_t index, DType dtype) {
  if (dtype == DType::kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == DType::kBFloat16 ? from_bf16(bits) : from_fp16(bits);
}
static inline void store(void* data, int64_t index, DType dtype, float value) {
  if (dtype == DType::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] = dtype == DType::kBFloat16 ? to_bf16(value) : to_fp16(value);
  }
}

}  // namespace qao::cpu
