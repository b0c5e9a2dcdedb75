// The swapped product of fp8 blocks: tokens are the 64-row operand of wgmma and 128 rows of W its columns. A thread
// then has two tokens and so two scales a K-tile, which it keeps in registers. As columns the tokens' scales would come
// from shared memory, a float for each token and thread: that takes its port, which the operands need, half as long
// again.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "mm8/sm90_epilogue.cuh"

namespace qao::mm8::sm90 {

// Scales of x times those of W for tokens g and g + 8, K-tile after K-tile. The four lanes of a token read four K-tiles
// ahead, a lane each.
struct TokenScales {
  int64_t token;
  const float *x[2], *weight;
  int at, end;  // this lane's K-tile, the last one that exists
  int turn;     // the lane that has the present K-tile's
  float present[2], next[2], next_weight;

  __device__ __forceinline__ void read() {
    const int group = min(at, end - 1);
    next_weight = __ldg(weight + group);
    next[0] = x[0][group], next[1] = x[1][group];
    at += 4;
  }
  __device__ __forceinline__ void take() {
    present[0] = next[0] * next_weight, present[1] = next[1] * next_weight;
    read();
  }
  // A token past the last one takes the last one's: its sums are not stored.
  __device__ __forceinline__ void start(const Params& p, const float* block_scales, int begin, int last) {
    for (int i = 0; i < 2; ++i) x[i] = p.columns + min(token + 8 * i, p.m - 1) * p.groups;
    weight = block_scales;
    at = begin + threadIdx.x % 4, end = last, turn = 0;
    read();
    take();
  }
  __device__ __forceinline__ float of(int i) const { return __shfl_sync(0xFFFFFFFFu, present[i], turn, 4); }
  __device__ __forceinline__ void advance() {
    turn = (turn + 1) & 3;
    if (turn == 0) take();
  }
};

// Where a thread's sums belong: tokens token and token + 8 of the tile; rows j * 8 + row and the next one.
struct SwappedThread {
  int lane = threadIdx.x % 32, token = threadIdx.x / 32 * 16 + lane / 4, row = lane % 4 * 2;
};

// y = sum + bias: the scales of both operands are in the sums. Bias of `row` and the next one.
__device__ __forceinline__ float2 swapped_bias(const Params& p, uint32_t rows, int row) {
  if (p.bias == nullptr) return {0, 0};
  return ptx::load_shared_float2(rows + (row / 64 * 3 + 2) * 64 * 4 + row % 64 * 4);
}

// Into a float32 y. Four lanes hold eight neighbouring rows: 32 bytes of y.
template <typename K>
__device__ __forceinline__ void write_swapped_float(const Params& p, const float (&sum)[kTileN / 8][4], uint32_t rows,
                                                    int64_t token0, int row0, int row_end) {
  const SwappedThread thread;
#pragma unroll
  for (int j = 0; j < kTileN / 8; ++j) {
    const int row = j * 8 + thread.row;
    const float2 bias = swapped_bias(p, rows, row);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t m = token0 + thread.token + e / 2 * 8;
      const int n = row0 + row + e % 2;
      if (m < p.m && n < row_end) static_cast<float*>(p.y)[m * p.n + n] = sum[j][e] + (e % 2 == 0 ? bias.x : bias.y);
    }
  }
}

// Into a y of 16 bits: a warp's 16 tokens, 64 rows of W at a time, through shared memory for stores of 16 bytes.
template <typename K>
__device__ __forceinline__ void write_swapped_half(const Params& p, const float (&sum)[kTileN / 8][4], uint32_t rows,
                                                   uint32_t buffers, int64_t token0, int row0, int row_end) {
  constexpr int kRowBytes = kChunkBytes / kChunkTokens, kWarpTokens = 16;
  const SwappedThread thread;
  const bool half = p.y_dtype == DType::kFloat16;
  const uint32_t tile = buffers + threadIdx.x / 32 * kWarpTokens * kRowBytes;
#pragma unroll
  for (int first = 0; first < kTileN; first += 64) {
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      uint32_t pairs[4];  // tokens 0..7 and 8..15 of eight rows, then of the next eight
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&of)[4] = sum[first / 8 + j + i];
        const float2 bias = swapped_bias(p, rows, first + (j + i) * 8 + thread.row);
        pairs[2 * i] = pack(of[0] + bias.x, of[1] + bias.y, half);
        pairs[2 * i + 1] = pack(of[2] + bias.x, of[3] + bias.y, half);
      }
      const int lane = thread.lane;
      ptx::stmatrix_x4(tile + lane % 16 * kRowBytes + (j + lane / 16) * 16, pairs);
    }
    __syncwarp();
    const int n = row0 + first + thread.lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < kWarpTokens; i += 4) {
      const int token = i + thread.lane / 8;
      const int64_t m = token0 + threadIdx.x / 32 * kWarpTokens + token;
      if (m >= p.m || n >= row_end) continue;
      store_eight(p, m, n, row_end, ptx::load_shared_16(tile + token * kRowBytes + thread.lane % 8 * 16));
    }
    __syncwarp();
  }
}

// `rows`: what fetch_scales brought for both warpgroups' rows, of which only the bias matters.
template <typename K>
__device__ __forceinline__ void write_swapped_result(const Params& p, const float (&sum)[kTileN / 8][4], uint32_t rows,
                                                     uint32_t buffers, int64_t token0, int row0) {
  const int row_end = min(p.n, row0 + p.tile_rows);
  if (p.bias != nullptr) ptx::named_barrier(3, kConsumerThreads);
  if (p.y_dtype == DType::kFloat32) {
    write_swapped_float<K>(p, sum, rows, token0, row0, row_end);
  } else {
    write_swapped_half<K>(p, sum, rows, buffers, token0, row0, row_end);
  }
  if (p.bias != nullptr) ptx::named_barrier(3, kConsumerThreads);  // before the next tile's overwrites it
}

}  // namespace qao::mm8::sm90
