// Zero points of int4 weights with 8-bit x: sum -= scale zero x_sum, once per tile.
//
// `zero` is the part that the operand does not include: zero - 8 with int8, the fraction with e4m3. Applied on
// promotion, with x_sum from shared memory, it would be half of the promotion's cost and take a third of the time of
// WGMMA.
#pragma once

#include <type_traits>

#include "common/centred.cuh"
#include "common/convert.cuh"
#include "common/mma.cuh"
#include "gemm/sm90_ws/load.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

// A float as two tf32 values; the lower one loses its last bits.
struct Tf32Parts {
  uint32_t upper, lower;
};
__device__ __forceinline__ Tf32Parts tf32_parts(float value) {
  const uint32_t upper = __float_as_uint(value) & 0xFFFFE000u;
  return {upper, __float_as_uint(value - __uint_as_float(upper))};
}

constexpr int kZeroGroups = 16;  // groups per step: a lane has four adjacent ones, in any order along k
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

// x_sum of one token for four groups from `first` on. Values past the last group are multiplied by zero.
__device__ __forceinline__ float4 read_sums(const Params& p, int64_t token, int first, bool aligned) {
  const float* sums = p.columns + min(token, p.m - 1) * p.groups;
  if (aligned) return *reinterpret_cast<const float4*>(sums + min(first, p.groups - 4));
  const int last = p.groups - 1;
  return {sums[min(first, last)], sums[min(first + 1, last)], sums[min(first + 2, last)], sums[min(first + 3, last)]};
}

// For a warp's 16 rows and the tile's tokens. With split-K, each of `split_k` CTAs has a part of the groups.
template <typename K>
__device__ __forceinline__ void subtract_zeros(const Params& p, int row_tile, int64_t token0, int split_k,
                                               float (&sum)[K::kTilesM][4]) {
  const int lane = threadIdx.x % 32, quads = (p.groups + 3) / 4, part = split_k > 1 ? ptx::cluster_rank() : 0;
  const int begin = quotient(quads * part, split_k) * 4, end = min(quotient(quads * (part + 1), split_k) * 4, p.groups);
  const bool aligned = p.groups % 4 == 0 && reinterpret_cast<uintptr_t>(p.columns) % 16 == 0;
#pragma unroll 1
  for (int step = begin; step < end; step += kZeroGroups) {
    const int first = step + lane % 4 * 4;
    // Load sums of x and zero points
    float4 sums[K::kTilesM];  // all loads in flight at once
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
    if (K::kCentred && !__any_sync(0xFFFFFFFFu, any)) continue;  // integer zero points only
    // Accumulate in two tf32 parts
    constexpr int kBlock = 4;  // interleaved token tiles hide the latency of dependent MMAs
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

}  // namespace qao::gemm::sm90_ws
