// The A operand of one K-tile from shared memory: a warp's 16 rows of W as the tensor cores take them.
#pragma once

#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/layout.h"
#include "mm8/sm90_kernels.h"

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

// A thread's share of a K-tile. 8-bit rows of 64 bytes, 16-byte chunks swizzled by row / 2 % 4: a thread's two bytes
// lie in a bank of their own. `scaled`: int4 beside a float x is multiplied by its scales.
template <typename T, Format format, bool scaled>
struct RawOperand {
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
  __device__ __forceinline__ void convert(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = widen<T, format>(bytes[step][i]);
    }
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}

// Int4 in two tiles of 64 k. For int8, 16 (q - 8): a nibble with its top bit flipped is q - 8 in two's complement. For
// e4m3, q 2^-9: the byte 0x0q itself.
template <typename T>
struct RawOperand<T, Format::kInt4, false> {
  uint4 words[2];

  // From a warp's row tile.
  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    const uint32_t from = weight + warp * 2 * int4_mm::kTileBytes + lane * 16;
    words[0] = ptx::load_shared_16(from);
    words[1] = ptx::load_shared_16(from + int4_mm::kTileBytes);
  }
  __device__ __forceinline__ void convert(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(words[step / 2], step % 2 * 2 + i);
        if constexpr (std::is_same_v<T, int8_t>) {
          a[step][2 * i] = (word << 4 ^ 0x88888888) & 0xF0F0F0F0;
          a[step][2 * i + 1] = (word ^ 0x88888888) & 0xF0F0F0F0;
        } else {
          a[step][2 * i] = word & 0x0F0F0F0F;
          a[step][2 * i + 1] = word >> 4 & 0x0F0F0F0F;
        }
      }
    }
  }
};

// Int4 in one tile of 64 k as whole numbers of T: (magic + q) + offset is exact. Registers of a step are rows g, g + 8,
// g, g + 8 of the row tile.
template <typename T>
struct WholeNumbers {
  uint4 words;

  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    words = ptx::load_shared_16(weight + warp * int4_mm::kTileBytes + lane * 16);
  }
  __device__ __forceinline__ void convert(uint32_t (&a)[4], int step, const uint32_t (&offset)[2]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Half<T>::add(ptx::and_or(word_of(words, step) >> (4 * i), 0x000F000F, Half<T>::kMagic), offset[i % 2]);
    }
  }
};

// q - 8, for a float32 x in bfloat16 parts: scales and zero points are applied to float32 sums.
template <>
struct RawOperand<__nv_bfloat16, Format::kInt4, false> : WholeNumbers<__nv_bfloat16> {
  __device__ __forceinline__ void convert(Operand& a) const {
    constexpr uint32_t kOffset = 0xC308C308;  // -(128 + 8)
#pragma unroll
    for (int step = 0; step < kSteps; ++step) WholeNumbers::convert(a[step], step, {kOffset, kOffset});
  }
};

// (q - zero) scale, rounded once: with q' = q - the whole part of zero, exact, it is scale q' + (rest q' + shift),
// where `rest` is what T cuts off the scale and `shift` the fraction of zero, scaled. Mostly both are zero.
struct RowScale {  // of one row of W in one group, values of T: scale << 16 | offset, shift << 16 | rest
  uint32_t main, rest;
};
template <typename T>
__device__ __forceinline__ RowScale row_scale(float scale, float zero) {
  const uint32_t offset = Half<T>::pair(-Half<T>::kMagicValue - zero), rounded = Half<T>::pair(scale);
  const float fraction = -Half<T>::low(offset) - Half<T>::kMagicValue - zero;
  return {__byte_perm(offset, rounded, 0x5410),
          __byte_perm(Half<T>::pair(scale - Half<T>::low(rounded)), Half<T>::pair(scale * fraction), 0x5410)};
}
__device__ __forceinline__ uint32_t pair_of_low(uint32_t word) { return __byte_perm(word, 0, 0x1010); }
__device__ __forceinline__ uint32_t pair_of_high(uint32_t word) { return __byte_perm(word, 0, 0x3232); }

template <typename T>
struct RawOperand<T, Format::kInt4, true> : WholeNumbers<T> {
  RowScale scales[2][2];  // of the halves of the K-tile, rows g and g + 8
  bool plain;             // the parts called `rest` are zero, for all of the warp

  static __device__ __forceinline__ RowScale load_scale(uint32_t from) {
    const uint2 words = ptx::load_shared_8(from);
    return {words.x, words.y};
  }
  // `from`: what make_scales() left, [group of the K-tile][row].
  template <int groups>
  __device__ __forceinline__ void load(uint32_t weight, uint32_t from, int warp, int lane) {
    WholeNumbers<T>::load(weight, warp, lane);
    const uint32_t at = from + (warp * 16 + lane / 4) * kRowScaleBytes;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      scales[0][high] = scales[1][high] = load_scale(at + high * 8 * kRowScaleBytes);
      if constexpr (groups > 1) scales[1][high] = load_scale(at + (kTileN + high * 8) * kRowScaleBytes);
    }
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) bits |= scales[i / 2][i % 2].rest;
    plain = !__any_sync(0xFFFFFFFFu, (bits & 0x7FFF7FFF) != 0);
  }
  __device__ __forceinline__ void convert(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const RowScale(&rows)[2] = scales[step / 2];
      WholeNumbers<T>::convert(a[step], step, {pair_of_low(rows[0].main), pair_of_low(rows[1].main)});
    }
    if (plain) {
      scale<false>(a);
    } else {
      scale<true>(a);
    }
  }
  template <bool exactly>
  __device__ __forceinline__ void scale(Operand& a) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t less = 0x80008000;  // minus zero
        const RowScale& row = scales[step / 2][i % 2];
        if (exactly) less = Half<T>::multiply_add(a[step][i], pair_of_low(row.rest), pair_of_high(row.rest));
        a[step][i] = Half<T>::multiply_add(a[step][i], pair_of_high(row.main), less);
      }
    }
  }
};

}  // namespace qao::mm8::sm90
