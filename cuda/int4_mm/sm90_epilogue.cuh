// From the sums of a tile to y: stored, or first added over the CTAs of a cluster in their order.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "int4_mm/sm90_producer.cuh"

namespace qao::int4_mm::sm90 {

// Of `count` rows of W, n and every `step`-th after it.
template <int count, int step>
struct Bias {
  float value[count];

  __device__ __forceinline__ Bias(const Params& p, int n) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      value[e] = p.bias != nullptr && n + e * step < p.n ? load_float(p.bias, n + e * step, p.bias_dtype) : 0.0f;
    }
  }
};

// One warpgroup's 64 rows from row0 of a tile whose K is split over the cluster: transposed into `tiles`, then every
// CTA adds up and stores its share of the tokens.
template <typename K>
__device__ __forceinline__ void write_split_result(const Params& p, const float (&sum)[K::kTilesM][4], uint32_t tiles,
                                                   int64_t token0, int row0) {
  const int thread = threadIdx.x % 128, lane = thread % 32, rank = ptx::cluster_rank();
  const uint32_t tile = tiles + threadIdx.x / 128 * K::kTokens * kPaddedRows * 4;
  const int row = thread % 16 * 4, n = row0 + row;
  const Bias<4, 1> bias(p, n);
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int to = (j * 8 + lane % 4 * 2 + e % 2) * kPaddedRows + thread / 32 * 16 + lane / 4 + e / 2 * 8;
      ptx::store_shared_float(tile + to * 4, sum[j][e]);
    }
  }
  ptx::cluster_barrier();
  const int end = static_cast<int>(min(static_cast<int64_t>((rank + 1) * K::kTokens / p.split_k), p.m - token0));
#pragma unroll 1
  for (int token = rank * K::kTokens / p.split_k + thread / 16; token < end && n < p.n; token += 8) {
    float total[4] = {};
#pragma unroll 1
    for (int r = 0; r < p.split_k; ++r) {
      const float4 part = ptx::load_cluster_float4(ptx::cluster_address(tile + (token * kPaddedRows + row) * 4, r));
      total[0] += part.x, total[1] += part.y, total[2] += part.z, total[3] += part.w;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] = p.factor * total[e] + bias.value[e];
    const int64_t at = (token0 + token) * p.n + n;
    if (p.n % 4 == 0) {
      store_float4(p.y, at, p.y_dtype, total);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (n + e < p.n) store_float(p.y, at + e, p.y_dtype, total[e]);
      }
    }
  }
  ptx::cluster_barrier();  // before the tile is used again
}

// The same of a whole tile into a float32 y. Eight lanes hold neighbouring rows: 32 bytes of y.
template <typename K>
__device__ __forceinline__ void write_float_result(const Params& p, const float (&sum)[K::kTilesM][4], int64_t token0,
                                                   int row0) {
  const int lane = threadIdx.x % 32, n = row0 + threadIdx.x % 128 / 32 * 16 + lane / 4;
  const Bias<2, 8> bias(p, n);
  float* y = static_cast<float*>(p.y) + (token0 + lane % 4 * 2) * p.n + n;
  const int64_t count = p.m - token0 - lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float value = p.factor * sum[j][e] + bias.value[e / 2];
      if (j * 8 + e % 2 < count && n + e / 2 * 8 < p.n)
        y[static_cast<int64_t>(j * 8 + e % 2) * p.n + e / 2 * 8] = value;
    }
  }
}

template <typename T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
}

// Into a y of T, a chunk of tokens at a time in two buffers by turns: transposed by stmatrix, stored eight rows of W at
// a time.
template <typename K>
__device__ __forceinline__ void write_half_result(const Params& p, const float (&sum)[K::kTilesM][4], uint32_t buffers,
                                                  int64_t token0, int row0) {
  constexpr int kChunkTokens = K::kStage.chunk_tokens, kBytes = kChunkTokens * kChunkRowBytes;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, warpgroup = threadIdx.x / 128;
  const Bias<2, 8> bias(p, row0 + warp * 16 + lane / 4);
#pragma unroll
  for (int first = 0; first < K::kTilesM; first += kChunkTokens / 8) {
    const uint32_t tile = buffers + (warpgroup * 2 + first * 8 / kChunkTokens % 2) * kBytes;
#pragma unroll
    for (int j = 0; j < kChunkTokens / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float (&of)[4] = sum[first + j + i / 2];
        pairs[i] = pack<typename K::T>(p.factor * of[i % 2 * 2] + bias.value[i % 2],
                                       p.factor * of[i % 2 * 2 + 1] + bias.value[i % 2]);
      }
      const int token = (j + lane / 16) * 8 + lane % 8;
      ptx::stmatrix_x4_transposed(tile + token * kChunkRowBytes + warp * 32 + lane / 8 % 2 * 16, pairs);
    }
    ptx::named_barrier(1 + warpgroup, 128);
    const int n = row0 + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < kChunkTokens / 16; ++i) {
      const int token = thread / 8 + i * 16;
      const int64_t m = token0 + first * 8 + token;
      if (m >= p.m || n >= p.n) continue;
      const uint4 eight = ptx::load_shared_16(tile + token * kChunkRowBytes + thread % 8 * 16);
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

}  // namespace qao::int4_mm::sm90
