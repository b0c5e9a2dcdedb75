// The A operand of an int4 W whose scales are whole numbers times one scale a row: (q - 8) whole in int8. Sums along
// all of K are whole numbers then, and the row's scale waits for the epilogue.
#pragma once

#include "common/ptx.cuh"
#include "int4/layout.h"
#include "mm/wgmma/operand.cuh"

namespace qao::mm::wgmma {

struct RowScaledOperand {
  uint4 words[2];
  uint2 whole[kAtomSteps];  // of each 32 columns: rows g and g + 8

  // From a warp's row tile, and what make_whole_scales() left in `whole_scales`; or without: one group a row.
  template <bool has_groups, int rows>
  __device__ __forceinline__ void load(uint32_t weight, uint32_t whole_scales, int warp, int lane) {
    const uint32_t tile = weight + warp * 2 * int4::kTileBytes + lane * 16;
    words[0] = ptx::load_shared_16(tile);
    words[1] = ptx::load_shared_16(tile + int4::kTileBytes);
    const uint32_t pair = whole_scales + (warp * 8 + lane / 4) * 8;
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
      whole[step] = has_groups ? ptx::load_shared_8(pair + step * rows * 4) : make_uint2(kOneGroup, kOneGroup);
    }
  }

  // q whole + (128 - 8 whole) is from 0 to 255, so that four of them are one multiplication without carries; less 128
  // it is the product. Others than the whole numbers from -15 to 16 give wrong products and do no harm.
  static __device__ __forceinline__ uint32_t multiplied(uint32_t nibbles, uint32_t whole) {
    return ((nibbles & 0x0F0F0F0F) * whole + (0x80808080 - whole * 0x08080808)) ^ 0x80808080;
  }
  __device__ __forceinline__ void convert(Operand<>& a) const {
#pragma unroll
    for (int step = 0; step < kAtomSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t word = word_of(words[step / 2], step % 2 * 2 + i);
        a[step][2 * i] = multiplied(word, whole[step].x);
        a[step][2 * i + 1] = multiplied(word >> 4, whole[step].y);
      }
    }
  }
};

}  // namespace qao::mm::wgmma
