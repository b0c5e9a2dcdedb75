// Conversion of W fragments of one k-tile from shared memory to the A operand, 16 rows per warp.
#pragma once

#include "common/centred.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "common/zero_point.cuh"
#include "gemm/sm90_ws/params.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

constexpr int kAtomSteps = 4;  // WGMMAs per 128 bytes of x: 32 bytes each
template <int steps = kAtomSteps>
using Operand = uint32_t[steps][4];

// Widens two bytes to two values of T, exactly.
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

// W fragments of one thread and k-tile. 8-bit rows have 64 or 128 bytes, with 16-byte chunks swizzled by TMA, so that
// reads of two bytes per thread are free of bank conflicts. `scaled`: int4 with float x, multiplied by its scales.
template <typename T, Format format, bool scaled, int rows, int steps = kAtomSteps>
struct RawOperand {
  uint16_t bytes[steps][4];

  // Loads a warp's 16 rows.
  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) {
    const int row = lane / 4;
    constexpr int kRowBytes = steps * 16;
    const uint32_t from = weight + (warp * 16 + row) * kRowBytes + lane % 4 * 2;
    const int swizzle = steps == 8 ? row : row / 2;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint32_t chunk = from + ((step ^ swizzle) << 4);
#pragma unroll
      for (int i = 0; i < 4; ++i) bytes[step][i] = ptx::load_shared_2(chunk + i % 2 * 8 * kRowBytes + i / 2 * 8);
    }
  }
  __device__ __forceinline__ void convert(Operand<steps>& a) const {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) a[step][i] = widen<T, format>(bytes[step][i]);
    }
  }
};

__device__ __forceinline__ uint32_t word_of(const uint4& words, int i) {
  return i == 0 ? words.x : i == 1 ? words.y : i == 2 ? words.z : words.w;
}
// Offset in W of a lane's nibbles of a warp's row tile, in tiles of 64 k, and their load.
template <int tiles>
__device__ __forceinline__ uint32_t word_offset(int warp, int lane) {
  return warp * (tiles * int4::kTileBytes) + lane * 16;
}
template <int tiles>
__device__ __forceinline__ void load_words(uint4 (&words)[tiles], uint32_t of_words) {
#pragma unroll
  for (int tile = 0; tile < tiles; ++tile) words[tile] = ptx::load_shared_16(of_words + tile * int4::kTileBytes);
}
template <int tiles>
__device__ __forceinline__ void load_words(uint4 (&words)[tiles], uint32_t weight, int warp, int lane) {
  load_words(words, weight + word_offset<tiles>(warp, lane));
}

// Offset of a lane's group parameters in the output of prepare_groups().
constexpr int kPreparedBytes = 16;  // of a pair of rows g and g + 8: their scales, and the codes of their zero points
template <int rows>
__device__ __forceinline__ uint32_t prepared_offset(int group, int warp, int lane) {
  return (group * (rows / 2) + warp * 8 + lane / 4) * kPreparedBytes;
}

// int4 in two tiles of 64 k to int8: 16 (q - 8). A nibble with flipped top bit is q - 8 in two's complement.
template <typename T, int rows>
struct RawOperand<T, Format::kInt4, false, rows> {
  uint4 words[2];

  // Loads a warp's row tile.
  __device__ __forceinline__ void load(uint32_t weight, int warp, int lane) { load_words(words, weight, warp, lane); }
  template <int groups>
  __device__ __forceinline__ void load_prepared(uint32_t weight, uint32_t, int warp, int lane) {
    load(weight, warp, lane);
  }
  __device__ __forceinline__ void convert(Operand<>& a) const {
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(words[step / 2], step % 2 * 2 + i);
        a[step][2 * i] = ptx::and_xor(word << 4, 0xF0F0F0F0, 0x80808080);
        a[step][2 * i + 1] = ptx::and_xor(word, 0xF0F0F0F0, 0x80808080);
      }
    }
  }
};

// int4 to e4m3: (q - integer zero) 2^-9, see common/centred.cuh.
template <int rows>
struct RawOperand<qao::wgmma::E4m3, Format::kInt4, false, rows> {
  uint4 words[2];
  centred::Codes codes[kAtomSteps];  // per 32 columns

  // `parameters`: group parameters of the warp's row tile, `groups` groups per k-tile.
  template <int groups>
  __device__ __forceinline__ void load(const Params& p, uint32_t weight, uint32_t parameters, int warp, int lane) {
    load_words(words, weight, warp, lane);
    const uint32_t groups_from = parameters + warp * groups * p.group_bytes;
    if (!p.has_zeros) {
#pragma unroll
      for (auto& of : codes) of = {0x08080808, 0x08080808};
    } else if (p.scale_dtype == DType::kBFloat16) {
      load_codes<groups, DType::kBFloat16>(p, groups_from, lane);
    } else if (p.scale_dtype == DType::kFloat16) {
      load_codes<groups, DType::kFloat16>(p, groups_from, lane);
    } else {
      load_codes<groups, DType::kFloat32>(p, groups_from, lane);
    }
  }
  // The same from the output of prepare_groups().
  template <int groups>
  __device__ __forceinline__ void load_prepared(uint32_t weight, uint32_t prepared, int warp, int lane) {
    load_words(words, weight, warp, lane);
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
      constexpr int kSpan = kAtomSteps / groups;
      if (step % kSpan > 0) {
        codes[step] = codes[step - 1];
        continue;
      }
      const uint2 of = ptx::load_shared_8(prepared + prepared_offset<rows>(step / kSpan, warp, lane) + 8);
      codes[step] = {of.x, of.y};
    }
  }
  template <int groups, DType dtype>
  __device__ __forceinline__ void load_codes(const Params& p, uint32_t from, int lane) {
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
      constexpr int kSpan = kAtomSteps / groups;
      if (step % kSpan > 0) {
        codes[step] = codes[step - 1];
        continue;
      }
      const uint32_t at = from + step / kSpan * p.group_bytes + (int4::kTileN + lane / 4) * size_of(dtype);
      codes[step] = {centred::four_codes(load_shared_float<dtype>(at)),
                     centred::four_codes(load_shared_float<dtype>(at + 8 * size_of(dtype)))};
    }
  }
  __device__ __forceinline__ void convert(Operand<>& a) const {
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(words[step / 2], step % 2 * 2 + i);
        centred::e4m3_rows(word, codes[step], a[step][2 * i], a[step][2 * i + 1]);
      }
    }
  }
};

// q - integer zero, for a float32 x in bfloat16 parts. Scales and fractions of zero points are applied on promotion.
template <int rows>
struct RawOperand<__nv_bfloat16, Format::kInt4, false, rows> {
  uint4 words[1];
  uint32_t minus[2][2];  // -(128 + integer zero), pairs: per 32 columns, rows g and g + 8

  // `parameters`: group parameters of the warp's row tile.
  __device__ __forceinline__ void load(const Params& p, uint32_t weight, uint32_t parameters, int warp, int lane) {
    load_words(words, weight, warp, lane);
    if (p.scale_dtype == DType::kBFloat16) {
      load_zeros<DType::kBFloat16>(p, parameters + warp * p.groups_per_tile * p.group_bytes, lane);
    } else if (p.scale_dtype == DType::kFloat16) {
      load_zeros<DType::kFloat16>(p, parameters + warp * p.groups_per_tile * p.group_bytes, lane);
    } else {
      load_zeros<DType::kFloat32>(p, parameters + warp * p.groups_per_tile * p.group_bytes, lane);
    }
  }
  template <DType dtype>
  __device__ __forceinline__ void load_zeros(const Params& p, uint32_t from, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t group = from + (p.groups_per_tile == 2 ? half * p.group_bytes : 0);
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int row = int4::kTileN + lane / 4 + high * 8;
        const float zero = p.has_zeros ? load_shared_float<dtype>(group + row * size_of(dtype)) : 8.0f;
        minus[half][high] = Half<__nv_bfloat16>::pair(-128 - whole_zero(zero));
      }
    }
  }
  __device__ __forceinline__ void convert(Operand<>& a) const {
    using Bfloat16 = Half<__nv_bfloat16>;
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t nibbles = word_of(words[0], step) >> (4 * i);
        a[step][i] = Bfloat16::add(ptx::and_or(nibbles, 0x000F000F, Bfloat16::kMagic), minus[step / 2][i % 2]);
      }
    }
  }
};

// A nibble in the low bits of a 16-bit lane (rows g of a row tile), or four bits higher (rows g + 8), reinterpreted as
// T: kBase + q kUnit. In bfloat16 this is subnormal; scales bring it to kSmall (q - zero) scale, in normal range.
template <typename T, bool high>
struct Nibble {
  static constexpr uint32_t kMask = high ? 0x00F000F0 : 0x000F000F, kMagic = high ? 0x54005400 : 0x64006400;
  static constexpr float kBase = high ? 64 : 1024, kUnit = 1, kSmall = 1;
};
template <bool high>
struct Nibble<__nv_bfloat16, high> {
  static constexpr uint32_t kMask = high ? 0x00F000F0 : 0x000F000F, kMagic = 0;
  static constexpr float kBase = 0, kUnit = high ? 0x1p-129f : 0x1p-133f, kSmall = 0x1p-33f;
};

// (q - zero) scale, rounded once. Let q' = q - (the part of zero representable in T next to kBase), exact. The result
// is scale q' + (rest q' + shift): `rest` is the rounding error of the scale in T, usually 0, `shift` that of zero,
// scaled.
struct RowScale {  // one row of W and group, values of T: scale << 16 | offset, shift << 16 | rest
  uint32_t main, rest;
};
template <typename T, bool high>
__device__ __forceinline__ RowScale row_scale(float scale, float zero) {
  using N = Nibble<T, high>;
  constexpr float kUp = 0x1p64f, kDown = 0x1p-64f / N::kUnit;  // 1 / kUnit overflows a float
  const float small = scale * (N::kSmall / N::kUnit);
  const uint32_t main = Half<T>::pair(-N::kBase - zero * N::kUnit, small);
  const float fraction = (-Half<T>::low(main) - N::kBase) * kUp * kDown - zero;
  return {main, Half<T>::pair(small - Half<T>::high(main), scale * fraction * N::kSmall)};
}
__device__ __forceinline__ uint32_t pair_of_low(uint32_t word) { return __byte_perm(word, 0, 0x1010); }
__device__ __forceinline__ uint32_t pair_of_high(uint32_t word) { return __byte_perm(word, 0, 0x3232); }

template <typename T, int rows, int steps>
struct RawOperand<T, Format::kInt4, true, rows, steps> {
  static constexpr int kTiles = steps / kAtomSteps;  // tiles of 64 k

  uint4 words[kTiles];
  uint2 main[steps / 2], rest[steps / 2];  // RowScale per 32 columns: rows g and g + 8
  bool has_rest;                           // the scale of any row of the tile

  // Offset of a lane's scales in the output of make_scales(), [group of the k-tile][main, rest][row tile][g][g, g + 8].
  static __device__ __forceinline__ uint32_t scale_offset(int warp, int lane) { return (warp * 8 + lane / 4) * 8; }

  template <int groups>
  __device__ __forceinline__ void load(uint32_t of_words, uint32_t of_scales, uint32_t rest_flag) {
    load<groups>(main, of_scales);
    load<groups>(rest, of_scales + rows * kRestBytes);
    load_words(words, of_words);
    has_rest = ptx::load_shared_word(rest_flag) != 0;
  }
  template <int groups>
  static __device__ __forceinline__ void load(uint2 (&to)[steps / 2], uint32_t from) {
    constexpr int kSpan = steps / 2 / groups;
#pragma unroll
    for (int i = 0; i < steps / 2; ++i) {
      to[i] = i % kSpan == 0 ? ptx::load_shared_8(from + i / kSpan * (rows * kRowScaleBytes)) : to[i - 1];
    }
  }
  template <bool high>
  static __device__ __forceinline__ uint32_t whole_numbers(uint32_t word, uint32_t scale) {
    using N = Nibble<T, high>;
    return Half<T>::add(ptx::and_or(word, N::kMask, N::kMagic), pair_of_low(scale));
  }
  __device__ __forceinline__ void convert(Operand<steps>& a) const {
    if (has_rest) {
      convert<true>(a);
    } else {
      convert<false>(a);
    }
  }
  template <bool exactly>
  __device__ __forceinline__ void convert(Operand<steps>& a) const {
#pragma unroll
    for (int step = 0; step < steps; ++step) {
      const uint32_t of[2] = {main[step / 2].x, main[step / 2].y}, cut[2] = {rest[step / 2].x, rest[step / 2].y};
      const uint32_t word = word_of(words[step / kAtomSteps], step % kAtomSteps), upper = word >> 8;
      const uint32_t whole[4] = {whole_numbers<false>(word, of[0]), whole_numbers<true>(word, of[1]),
                                 whole_numbers<false>(upper, of[0]), whole_numbers<true>(upper, of[1])};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        uint32_t added = pair_of_high(cut[i % 2]);
        if (exactly) added = Half<T>::multiply_add(whole[i], pair_of_low(cut[i % 2]), added);
        a[step][i] = Half<T>::multiply_add(whole[i], pair_of_high(of[i % 2]), added);
      }
    }
  }
};

}  // namespace qao::gemm::sm90_ws
