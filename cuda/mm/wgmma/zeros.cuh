// Zero points of an int4 W beside an x of eight bits: sum -= scale zero x_sum over the groups along K, once a tile. Of
// zero that is what the operand has not: beside int8 zero - 8, beside e4m3 the fraction.
// Once a group, with x_sum from shared memory, it would be half of a fold and take as long as a third of the products.
#pragma once

#include <type_traits>

#include "common/centred.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "int4/layout.h"
#include "mm/wgmma/producer.cuh"

namespace qao::mm::wgmma {

// A float as two of tf32, which cuts the lower one's last bits off.
struct Tf32Parts {
  uint32_t upper, lower;
};
__device__ __forceinline__ Tf32Parts tf32_parts(float value) {
  const uint32_t upper = __float_as_uint(value) & 0xFFFFE000u;
  return {upper, __float_as_uint(value - __uint_as_float(upper))};
}

constexpr int kZeroGroups = 16;  // of a step: a lane has four neighbours, for any order of them along k will do

// -scale zero, in the units of the product (RawOperand), of rows g and g + 8 of a row tile for this lane's groups from
// `first` on; 0 from `end` on.
template <typename K, DType dtype>
__device__ __forceinline__ void read_zeros(const Params& p, int row_tile, int first, int end, float (&to)[4][2]) {
  const int row = threadIdx.x % 32 / 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const int64_t at = (static_cast<int64_t>(row_tile) * p.groups + min(first + i, end - 1)) * 2;
      const int64_t scale_at = at * int4::kTileN + row + 8 * high;
      const float zero = load_float(p.scales, scale_at + int4::kTileN, dtype);
      const float in_product = K::kCentred ? centred::fraction(zero) / centred::kE4m3Factor : 16 * (zero - 8);
      to[i][high] = first + i < end ? -load_float(p.scales, scale_at, dtype) * in_product : 0.0f;
    }
  }
}
template <typename K>
__device__ __forceinline__ void read_zeros(const Params& p, int row_tile, int first, int end, float (&to)[4][2]) {
  if (p.scale_dtype == DType::kBFloat16) {
    read_zeros<K, DType::kBFloat16>(p, row_tile, first, end, to);
  } else if (p.scale_dtype == DType::kFloat16) {
    read_zeros<K, DType::kFloat16>(p, row_tile, first, end, to);
  } else {
    read_zeros<K, DType::kFloat32>(p, row_tile, first, end, to);
  }
}

// x_sum of one token's four groups from `first` on. What lies past the last group meets a zero.
__device__ __forceinline__ float4 read_sums(const Params& p, int64_t token, int first, bool aligned) {
  const float* sums = p.columns + min(token, p.m - 1) * p.groups;
  if (aligned) return *reinterpret_cast<const float4*>(sums + min(first, p.groups - 4));
  const int last = p.groups - 1;
  return {sums[min(first, last)], sums[min(first + 1, last)], sums[min(first + 2, last)], sums[min(first + 3, last)]};
}

// Of a warp's 16 rows and the tile's tokens, this CTA's part of the groups where `split_k` of a cluster have one each.
template <typename K>
__device__ __forceinline__ void subtract_zeros(const Params& p, int row_tile, int64_t token0, int split_k,
                                               float (&sum)[K::kTilesM][4]) {
  const int lane = threadIdx.x % 32, quads = (p.groups + 3) / 4, part = split_k > 1 ? ptx::cluster_rank() : 0;
  const int begin = quotient(quads * part, split_k) * 4, end = min(quotient(quads * (part + 1), split_k) * 4, p.groups);
  const bool aligned = p.groups % 4 == 0 && reinterpret_cast<uintptr_t>(p.columns) % 16 == 0;
#pragma unroll 1
  for (int step = begin; step < end; step += kZeroGroups) {
    const int first = step + lane % 4 * 4;
    float4 sums[K::kTilesM];  // all under way at once
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) sums[j] = read_sums(p, token0 + j * 8 + lane / 4, first, aligned);
    float zeros[4][2];
    read_zeros<K>(p, row_tile, first, end, zeros);
    bool any = false;
    uint32_t upper[2][4], lower[2][4];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const Tf32Parts parts = tf32_parts(zeros[i / 2][i % 2]);
      upper[i / 4][i % 4] = parts.upper, lower[i / 4][i % 4] = parts.lower;
      any |= zeros[i / 2][i % 2] != 0;
    }
    if (K::kCentred && !__any_sync(0xFFFFFFFFu, any)) continue;  // whole zero points
    constexpr int kBlock = 4;  // token tiles by turns: a product waits for the last one of its sums
#pragma unroll
    for (int block = 0; block < K::kTilesM; block += kBlock) {
      Tf32Parts x[kBlock][4];
#pragma unroll
      for (int j = 0; j < kBlock; ++j) {
        const float4& of = sums[block + j];
        x[j][0] = tf32_parts(of.x), x[j][1] = tf32_parts(of.y), x[j][2] = tf32_parts(of.z), x[j][3] = tf32_parts(of.w);
      }
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const auto add = [&](auto multiply) {
#pragma unroll
          for (int j = 0; j < kBlock; ++j) multiply(sum[block + j], x[j][i], x[j][i + 1]);
        };
        add([&](auto& to, const Tf32Parts& a, const Tf32Parts& b) { mma_tf32(to, lower[i / 2], a.upper, b.upper); });
        add([&](auto& to, const Tf32Parts& a, const Tf32Parts& b) { mma_tf32(to, upper[i / 2], a.lower, b.lower); });
        add([&](auto& to, const Tf32Parts& a, const Tf32Parts& b) { mma_tf32(to, upper[i / 2], a.upper, b.upper); });
      }
    }
  }
}

}  // namespace qao::mm::wgmma
