// Exact conversion of four 8-bit values to 16 bits, up to a power of two (kFactor).
//
// The caller applies kFactor. The results are pairs: bytes 0 and 1, bytes 2 and 3.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/mma.cuh"

namespace qao::widen {

// value = kFactor * result of run().
template <typename From, typename To>
struct Widen;

struct Int8 {};
struct Fp8 {};

// Bytes 2 i and 2 i + 1 of `word` as the low or the high bytes of two 16-bit lanes; bytes of `other` fill the rest.
__device__ __forceinline__ uint32_t low_bytes(uint32_t word, uint32_t other, int i) {
  return __byte_perm(word, other, i == 0 ? 0x4140 : 0x4342);
}
__device__ __forceinline__ uint32_t high_bytes(uint32_t word, int i) {
  return __byte_perm(word, 0, i == 0 ? 0x1404 : 0x3424);
}

__device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// A byte u read as a bfloat16 is u 2^-133: subnormals and the first binade have the same step.
template <>
struct Widen<Int8, __nv_bfloat16> {
  static constexpr float kFactor = 0x1p6f;
  static __device__ __forceinline__ void run(uint32_t word, uint32_t (&to)[2]) {
    const uint32_t biased = word ^ 0x80808080;  // q + 128
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      to[i] = multiply_add(low_bytes(biased, 0, i), 0x7F007F00, 0xC000C000);  // 2^127 u 2^-133 - 2
    }
  }
};

// 0x6400 | u is 1024 + u.
template <>
struct Widen<Int8, __half> {
  static constexpr float kFactor = 1;
  static __device__ __forceinline__ void run(uint32_t word, uint32_t (&to)[2]) {
    const uint32_t biased = word ^ 0x80808080;
#pragma unroll
    for (int i = 0; i < 2; ++i) to[i] = Half<__half>::add(low_bytes(biased, 0x64646464, i), 0xE480E480);  // - 1152
  }
};

// Exponent and mantissa shifted into position give value 2^-120. A NaN becomes 480: see nan_bytes().
template <>
struct Widen<Fp8, __nv_bfloat16> {
  static constexpr float kFactor = 1;
  static __device__ __forceinline__ void run(uint32_t word, uint32_t (&to)[2]) {
    const uint32_t lanes = __byte_perm(word, 0, 0x3120);  // bytes 0 and 1 in the low bytes of lanes, 2 and 3 high
    const uint32_t low = ptx::and_or(lanes << 8, 0x80008000, lanes << 4 & 0x07F007F0);
    const uint32_t high = ptx::and_or(lanes, 0x80008000, lanes >> 4 & 0x07F007F0);
    to[0] = multiply_add(low, 0x7B807B80, 0);
    to[1] = multiply_add(high, 0x7B807B80, 0);
  }
};

template <>
struct Widen<Fp8, __half> {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  static constexpr float kFactor = 1;
  static __device__ __forceinline__ void run(uint32_t word, uint32_t (&to)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(to[i]) : "h"(static_cast<uint16_t>(word >> 16 * i)));
    }
  }
#else
  static constexpr float kFactor = 0x1p8f;
  static __device__ __forceinline__ void run(uint32_t word, uint32_t (&to)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t lanes = high_bytes(word, i);
      const uint32_t nan = (lanes & 0x7F007F00) + 0x01000100 & 0x80008000;
      to[i] = ptx::and_or(lanes, 0x80008000, lanes >> 1 & 0x3F803F80) | nan >> 1;
    }
  }
#endif
};

// Sets bit 7 of each byte that is an e4m3 NaN; other bits are undefined.
__device__ __forceinline__ uint32_t nan_bytes(uint32_t word) { return (word & 0x7F7F7F7F) + 0x01010101; }

}  // namespace qao::widen
