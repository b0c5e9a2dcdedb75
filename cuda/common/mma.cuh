// mma.sync of 16-bit types and tf32, and the pairwise arithmetic that converts nibbles to 16 bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/ptx.cuh"
#include "qao/types.h"

namespace qao {

template <typename T>
struct Half;  // operations that differ between bfloat16 and float16

template <>
struct Half<__nv_bfloat16> {
  static constexpr DType kDType = DType::kBFloat16;
  // 2^7: OR-ing a nibble into the low mantissa bits adds the nibble.
  static constexpr uint32_t kMagic = 0x43004300;
  static constexpr float kMagicValue = 128;

  static __device__ __forceinline__ uint32_t pair(float value) {
    const __nv_bfloat162 both = __float2bfloat162_rn(value);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint32_t pair(uint16_t bits) { return bits * 0x00010001u; }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint32_t negate(uint32_t pair) { return pair ^ 0x80008000; }
  static __device__ __forceinline__ float low(uint32_t pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(uint32_t pair) { return __uint_as_float(pair & 0xFFFF0000); }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;\n" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
  }
  // add.bf16x2 needs sm_90; multiplication by one is exact
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) { return multiply_add(a, 0x3F803F80u, b); }
  // d[16 x 8] += a[16 x 16] b[16 x 8]
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

template <>
struct Half<__half> {
  static constexpr DType kDType = DType::kFloat16;
  static constexpr uint32_t kMagic = 0x64006400;  // 2^10
  static constexpr float kMagicValue = 1024;

  static __device__ __forceinline__ uint32_t pair(float value) {
    const __half2 both = __float2half2_rn(value);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint32_t pair(uint16_t bits) { return bits * 0x00010001u; }
  static __device__ __forceinline__ uint32_t pair(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
  }
  static __device__ __forceinline__ uint32_t negate(uint32_t pair) { return pair ^ 0x80008000; }
  static __device__ __forceinline__ float low(uint32_t pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair)));
  }
  static __device__ __forceinline__ float high(uint32_t pair) { return low(pair >> 16); }
  static __device__ __forceinline__ uint32_t add(uint32_t a, uint32_t b) {
    uint32_t sum;
    asm("add.f16x2 %0, %1, %2;\n" : "=r"(sum) : "r"(a), "r"(b));
    return sum;
  }
  static __device__ __forceinline__ uint32_t multiply_add(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t sum;
    asm("fma.rn.f16x2 %0, %1, %2, %3;\n" : "=r"(sum) : "r"(a), "r"(b), "r"(c));
    return sum;
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
};

// d[16 x 8] += a[16 x 8] b[8 x 8] in tf32, which uses the upper 19 bits of each float32. Fragments as in mma.m16n8k8.
__device__ __forceinline__ void mma_tf32(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

}  // namespace qao
