// The A operand of one K-tile from shared memory: a warp's 16 rows of W as the tensor cores take them.
#pragma once

#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/layout.h"

namespace qao::mm8::sm90 {

constexpr int kSteps = 4;  // products per K-tile: 128 bytes of x, 32 each
using Operand = uint32_t[kSteps][4];

// Two bytes as two values of T, exactly.
template <typename T, Format format>
__device__ __forceinline__ uint32_t widen(uint32_t bytes) {
  if constexpr (format == Format::kFp8) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;\n" : "=r"(halves) : "h"(static_cast<uint16_t>(bytes)));
    if constexpr (std::is_same_v<T, __half>) return halves;
    const float2 values = __half22float2(*reinterpret_cast<const __half2*>(&halves));
    const __nv_bfloat162 pair = __float22bfloat162_rn(values);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else if constexpr (std::is_same_v<T, __half>) {  // 1024 + (128 + v) - 1152
    return Half<T>::add(__byte_perm(bytes ^ 0x8080, 0x64646464, 0x4140), Half<T>::pair(-1152.0f));
  } else {  // (128 + low seven bits) - (128, or 256 where v is negative)
    const uint32_t spread = __byte_perm(bytes, 0x43434343, 0x4140);
    const uint32_t low = spread & 0xFF7FFF7F, sign = spread & 0xFF80FF80;
    const __nv_bfloat162 pair =
        __hsub2(*reinterpret_cast<const __nv_bfloat162*>(&low), *reinterpret_cast<const __nv_bfloat162*>(&sign));
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// 8-bit rows of 64 bytes, 16-byte chunks swizzled by row / 2 % 4. A thread's two bytes lie in a bank of their own.
template <typename T, Format format>
struct RawOperand {  // a thread's share of a K-tile
  uint16_t bytes[kSteps][4];

  // From a warp's 16 rows.
  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    const int row = lane / 4;
    const uint32_t from = weight + (warp * 16 + row) * 64 + lane % 4 * 2;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const uint32_t chunk = from + ((step ^ (row / 2)) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[step][i] = ptx::load_shared_2(chunk + i % 2 * 8 * 64 + i / 2 * 8);
    }
  }
  template <int step>
  __device__ __forceinline__ void convert(uint32_t (&a)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = widen<T, format>(bytes[step][i]);
  }
};

// Int4 in two tiles of 64 k. For int8, 16 (q - 8): a nibble with its top bit flipped is q - 8 in two's complement. For
// e4m3, q 2^-9: the byte 0x0q itself.
template <typename T>
struct RawOperand<T, Format::kInt4> {
  uint4 words[2];

  // From a warp's row tile.
  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    const uint32_t from = weight + warp * 2 * int4_mm::kTileBytes + lane * 16;
    words[0] = ptx::load_shared_16(from);
    words[1] = ptx::load_shared_16(from + int4_mm::kTileBytes);
  }
  template <int step>
  __device__ __forceinline__ void convert(uint32_t (&a)[4]) const {
    const uint4& four = words[step / 2];
    const uint32_t word[2] = {step % 2 == 0 ? four.x : four.z, step % 2 == 0 ? four.y : four.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if constexpr (std::is_same_v<T, int8_t>) {
        a[2 * i] = (word[i] << 4 ^ 0x88888888) & 0xF0F0F0F0;
        a[2 * i + 1] = (word[i] ^ 0x88888888) & 0xF0F0F0F0;
      } else {
        a[2 * i] = word[i] & 0x0F0F0F0F;
        a[2 * i + 1] = word[i] >> 4 & 0x0F0F0F0F;
      }
    }
  }
};

}  // namespace qao::mm8::sm90
