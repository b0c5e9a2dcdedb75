// The A operand of one K-tile from shared memory: a warp's 16 rows of W as the tensor cores take them.
#pragma once

#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/layout.h"

namespace qao::mm8::sm90 {

constexpr int kSteps = 4;  // products per K-tile: 128 bytes of x, 32 each
using Operand = uint32_t[kSteps][4];

// Int4: `tile` is the row tile's two tiles of 64 k. For int8, 16 (q - 8): a nibble with its top bit flipped is q - 8 in
// two's complement. For e4m3, q 2^-9: the byte 0x0q itself.
template <typename T>
__device__ __forceinline__ void load_packed(uint32_t tile, int lane, Operand& a) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 words = ptx::load_shared_16(tile + half * int4_mm::kTileBytes + lane * 16);
    const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t(&to)[4] = a[half * 2 + i / 2];
      if constexpr (std::is_same_v<T, int8_t>) {
        to[i % 2 * 2] = (word[i] << 4 ^ 0x88888888) & 0xF0F0F0F0;
        to[i % 2 * 2 + 1] = (word[i] ^ 0x88888888) & 0xF0F0F0F0;
      } else {
        to[i % 2 * 2] = word[i] & 0x0F0F0F0F;
        to[i % 2 * 2 + 1] = word[i] >> 4 & 0x0F0F0F0F;
      }
    }
  }
}

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

// 8-bit rows of 64 bytes, 16-byte chunks swizzled by row / 2 % 4; `rows` is the warp's first, a multiple of 16.
// A thread's two bytes lie in a bank of their own.
template <typename T, Format format>
__device__ __forceinline__ void load_rows(uint32_t rows, int lane, Operand& a) {
  const int row = lane / 4;
  const uint32_t from = rows + row * 64 + lane % 4 * 2;
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const uint32_t chunk = from + ((step ^ (row / 2)) << 4);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[step][i] = widen<T, format>(ptx::load_shared_2(chunk + i % 2 * 8 * 64 + i / 2 * 8));
    }
  }
}

}  // namespace qao::mm8::sm90
