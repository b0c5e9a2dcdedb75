// From the sums of a tile to y: added over the CTAs of a cluster in their order, transposed through shared memory,
// scaled, and stored four rows of W at a time.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "mm8/sm90_kernels.h"
#include "mm8/sm90_tile.h"

namespace qao::mm8::sm90 {

// What one thread needs of `count` rows of W, n and every `step`-th after it.
template <int count, int step>
struct Rows {
  float scale[count], weight_sum[count], bias[count];

  __device__ __forceinline__ Rows(const Params& p, int n) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      const int row = n + e * step;
      const bool exists = row < p.n;
      scale[e] = p.factor;
      if (p.row_scales != nullptr && exists) scale[e] *= p.row_scales[row * p.row_scale_stride];
      weight_sum[e] = p.weight_sums != nullptr && exists ? p.weight_sums[row] : 0.0f;
      bias[e] = p.bias != nullptr && exists ? load_float(p.bias, row, p.bias_dtype) : 0.0f;
    }
  }
  __device__ __forceinline__ float finish(int e, float sum, float x_scale, float x_zero) const {
    return x_scale * (scale[e] * sum - x_zero * weight_sum[e]) + bias[e];
  }
};

// Scales and zero points of a tile's tokens wait in shared memory, a copy for each warpgroup: [2][tokens].
template <int tokens>
__device__ __forceinline__ void fetch_tokens(const Params& p, uint32_t to, int64_t token0) {
  for (int i = threadIdx.x % 128; i < tokens; i += 128) {
    const bool exists = token0 + i < p.m;
    const int64_t token = exists ? token0 + i : 0;
    if (p.x_scales != nullptr) ptx::cp_async_4(to + i * 4, p.x_scales + token * p.x_scale_stride, exists);
    if (p.x_zeros != nullptr) ptx::cp_async_4(to + (tokens + i) * 4, p.x_zeros + token, exists);
  }
  ptx::cp_async_commit();
}

__device__ __forceinline__ void store(const Params& p, const Rows<4, 1>& rows, float x_scale, float x_zero,
                                      int64_t token, int n, const float4& sum) {
  const float sums[4] = {sum.x, sum.y, sum.z, sum.w};
  float value[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    value[e] = rows.finish(e, sums[e], x_scale, x_zero);
  }
  const int64_t at = token * p.n + n;
  if (p.n % 4 == 0) {
    store_float4(p.y, at, p.y_dtype, value);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < p.n) store_float(p.y, at + e, p.y_dtype, value[e]);
    }
  }
}

// One warpgroup's 64 rows from row0, `chunk` tokens at a time in two buffers by turns. With `clustered` a chunk is all
// of the tile, and every CTA of the cluster stores its share of the tokens.
template <int chunk, bool clustered, int tiles_m, typename Sum>
__device__ __forceinline__ void write_result(const Params& p, const Sum (&sum)[tiles_m][4], uint32_t buffers,
                                             uint32_t tokens, int64_t token0, int row0) {
  const int thread = threadIdx.x % 128, lane = thread % 32, warpgroup = threadIdx.x / 128;
  const int rank = clustered ? ptx::cluster_rank() : 0, ranks = clustered ? p.split_k : 1;
  const auto sync = [&] {
    if constexpr (clustered) {
      ptx::cluster_barrier();
    } else {
      ptx::named_barrier(1 + warpgroup, 128);
    }
  };
  constexpr int kBytes = chunk * kPaddedN * 4;
  const int row = thread % 16 * 4, n = row0 + row;
  const Rows<4, 1> rows(p, n);
  ptx::cp_async_wait<0>();  // of fetch_tokens
#pragma unroll
  for (int first = 0; first < tiles_m * 8; first += chunk) {
    const uint32_t tile = buffers + (clustered ? warpgroup : warpgroup * 2 + first / chunk % 2) * kBytes;
#pragma unroll
    for (int j = 0; j < chunk / 8; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int to = (j * 8 + lane % 4 * 2 + e % 2) * kPaddedN + thread / 32 * 16 + lane / 4 + e / 2 * 8;
        ptx::store_shared_float(tile + to * 4, static_cast<float>(sum[first / 8 + j][e]));
      }
    }
    sync();
    const int end = static_cast<int>(min(static_cast<int64_t>((rank + 1) * chunk / ranks), p.m - token0 - first));
    for (int token = rank * chunk / ranks + thread / 16; token < end; token += 8) {
      const uint32_t from = tile + (token * kPaddedN + row) * 4;
      float4 total = {0, 0, 0, 0};
      for (int r = 0; r < ranks; ++r) {
        const float4 part = ptx::load_cluster_float4(clustered ? ptx::cluster_address(from, r) : from);
        total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
      }
      const uint32_t at = tokens + (first + token) * 4;
      const float x_scale = p.x_scales != nullptr ? ptx::load_shared_float(at) : 1.0f;
      const int x_zero = p.x_zeros != nullptr ? ptx::load_shared_int(at + tiles_m * 8 * 4) : 0;
      if (n < p.n) store(p, rows, x_scale, static_cast<float>(x_zero), token0 + first + token, n, total);
    }
  }
  sync();  // before the buffers are used again
}

// Two values in the 16 bits of y.
__device__ __forceinline__ uint32_t pack(const Params& p, float low, float high) {
  if (p.y_dtype == DType::kFloat16) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// The same into a y of 16 bits: scaled in registers, transposed by stmatrix, stored eight rows of W at a time.
template <int tiles_m, typename Sum>
__device__ __forceinline__ void write_half_result(const Params& p, const Sum (&sum)[tiles_m][4], uint32_t buffers,
                                                  uint32_t tokens, int64_t token0, int row0) {
  constexpr int kBytes = kHalfChunkTokens * kHalfRowBytes;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, warpgroup = threadIdx.x / 128;
  const Rows<2, 8> rows(p, row0 + warp * 16 + lane / 4);
  ptx::cp_async_wait<0>();  // of fetch_tokens
  ptx::named_barrier(1 + warpgroup, 128);
#pragma unroll
  for (int first = 0; first < tiles_m; first += kHalfChunkTokens / 8) {
    const uint32_t tile = buffers + (warpgroup * 2 + first * 8 / kHalfChunkTokens % 2) * kBytes;
#pragma unroll
    for (int j = 0; j < kHalfChunkTokens / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t at = tokens + ((first + j + i) * 8 + lane % 4 * 2) * 4;
        const float2 scale = p.x_scales != nullptr ? ptx::load_shared_float2(at) : float2{1, 1};
        const Sum(&of)[4] = sum[first + j + i];
        float2 zero = {0, 0};
        if (p.x_zeros != nullptr) {
          zero.x = static_cast<float>(ptx::load_shared_int(at + tiles_m * 8 * 4));
          zero.y = static_cast<float>(ptx::load_shared_int(at + tiles_m * 8 * 4 + 4));
        }
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          pairs[2 * i + high] = pack(p, rows.finish(high, static_cast<float>(of[2 * high]), scale.x, zero.x),
                                     rows.finish(high, static_cast<float>(of[2 * high + 1]), scale.y, zero.y));
        }
      }
      const int token = (j + lane / 16) * 8 + lane % 8;
      ptx::stmatrix_x4_transposed(tile + token * kHalfRowBytes + warp * 32 + lane / 8 % 2 * 16, pairs);
    }
    ptx::named_barrier(1 + warpgroup, 128);
    const int n = row0 + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < kHalfChunkTokens / 16; ++i) {
      const int token = thread / 8 + i * 16;
      const int64_t m = token0 + first * 8 + token;
      if (m >= p.m || n >= p.n) continue;
      const uint4 eight = ptx::load_shared_16(tile + token * kHalfRowBytes + thread % 8 * 16);
      uint16_t* y = static_cast<uint16_t*>(p.y) + m * p.n + n;
      if (p.n % 8 == 0) {
        *reinterpret_cast<uint4*>(y) = eight;
      } else {
        const uint32_t word[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          if (n + e < p.n) y[e] = static_cast<uint16_t>(word[e / 2] >> e % 2 * 16);
        }
      }
    }
  }
  ptx::named_barrier(1 + warpgroup, 128);  // before the buffers are used again
}

}  // namespace qao::mm8::sm90
