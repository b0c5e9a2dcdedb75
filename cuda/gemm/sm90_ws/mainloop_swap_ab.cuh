// Swap-AB for fp8 blocks: tokens are the 64-row A operand of WGMMA, rows of W the B operand.
//
// A thread then has two tokens, and keeps their two scales per k-tile in registers. With tokens as columns, each thread
// would read a scale per token from shared memory. Its bandwidth is needed for operands; scales would add half as much.
#pragma once

#include <cstdint>

#include "common/ptx.cuh"
#include "gemm/sm90_ws/epilogue.cuh"

namespace qao::gemm::sm90_ws {

// A thread's first token in the tile; the other one is at + 8.
template <typename K>
__device__ __forceinline__ int swapped_token() {
  return threadIdx.x % (K::kOwnTokens ? K::kConsumerThreads : 128) / 32 * 16 + threadIdx.x % 32 / 4;
}

// Scales of x times scales of W for a thread's two tokens, per k-tile. The four lanes of a token prefetch four k-tiles,
// one per lane. A warpgroup's rows may span two scale blocks of W.
template <typename K>
struct TokenScales {
  static constexpr int kBlocks = K::kOwnTokens ? 1 : 2;

  const float *x[2], *weight[kBlocks];
  int next_block;  // the first row of the second block
  int at, end;     // this lane's k-tile, and the end of K
  int turn;        // the lane that holds the current k-tile's scales
  float scales[2][kBlocks], next[2], next_weight[kBlocks];

  // Tokens past the last one are clamped to it; their sums are not stored.
  __device__ __forceinline__ void place(const Params& p, const Place& of, int row0) {
    const int64_t token0 = first_token<K>(of);
    for (int i = 0; i < 2; ++i) x[i] = p.columns + min(token0 + swapped_token<K>() + 8 * i, p.m - 1) * p.groups;
    const int block = row0 / kScaleBlock, blocks = (p.n - 1) / kScaleBlock;
    for (int i = 0; i < kBlocks; ++i)
      weight[i] = p.block_scales + (of_expert<K>(of, blocks + 1) + int64_t{min(block + i, blocks)}) * p.groups;
    next_block = (block + 1) * static_cast<int>(kScaleBlock) - row0;
  }
  __device__ __forceinline__ void read() {
    const int group = min(at, end - 1);
    for (int i = 0; i < kBlocks; ++i) next_weight[i] = __ldg(weight[i] + group);
    next[0] = x[0][group], next[1] = x[1][group];
    at += 4;
  }
  __device__ __forceinline__ void take() {
    for (int i = 0; i < kBlocks; ++i) scales[0][i] = next[0] * next_weight[i], scales[1][i] = next[1] * next_weight[i];
    read();
  }
  __device__ __forceinline__ void start(int begin, int last) {
    at = begin + threadIdx.x % 4, end = last, turn = 0;
    read();
    take();
  }
  __device__ __forceinline__ float present(int token, int block) const {
    return block < kBlocks ? __shfl_sync(0xFFFFFFFFu, scales[token][block % kBlocks], turn, 4) : 0.0f;
  }
  __device__ __forceinline__ void advance() {
    turn = (turn + 1) & 3;
    if (turn == 0) take();
  }
};

// y = sum + bias: sums include the scales of both operands. Bias of `row` and the next row. `rows`: output of
// fetch_scales for this warpgroup's 64 rows; the other warpgroup's is 3 * 64 * 4 bytes further.
__device__ __forceinline__ float2 swapped_bias(const Params& p, uint32_t rows, int row) {
  if (p.bias == nullptr) return {0, 0};
  return ptx::load_shared_float2(rows + (row / 64 * 3 + 2) * 64 * 4 + row % 64 * 4);
}

// Factors (row_scale) of a thread's two tokens.
template <typename K>
struct SwappedFactors {
  float of[2] = {1, 1};

  __device__ __forceinline__ SwappedFactors(const Params& p, uint32_t tokens) {
    if constexpr (K::kGrouped) {
      if (static_cast<const GroupedParams&>(p).routing.row_scale == nullptr) return;
      const uint32_t from = tokens + (2 * K::kTokens + swapped_token<K>()) * 4;
      of[0] = ptx::load_shared_float(from), of[1] = ptx::load_shared_float(from + 8 * 4);
    }
  }
};

// Stores float32 y. Four lanes hold eight adjacent rows: 32 bytes of y.
template <typename K>
__device__ __forceinline__ void write_swapped_float(const Params& p, const float (&sum)[K::kTilesM][4],
                                                    const Target& at) {
  const SwappedFactors<K> factor(p, at.tokens);
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
    const int row = j * 8 + threadIdx.x % 4 * 2;
    const float2 bias = swapped_bias(p, at.rows, row);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int64_t m = at.token0 + swapped_token<K>() + e / 2 * 8;
      const int n = at.row0 + row + e % 2;
      const float value = factor.of[e / 2] * (sum[j][e] + (e % 2 == 0 ? bias.x : bias.y));
      if (m < at.token_end && n < at.row_end) static_cast<float*>(p.y)[m * p.n + n] = value;
    }
  }
}

// Stores 16-bit y: a warp's 16 tokens, 64 rows of W at a time, through shared memory for 16-byte stores.
template <typename K>
__device__ __forceinline__ void write_swapped_half(const Params& p, const float (&sum)[K::kTilesM][4], uint32_t buffers,
                                                   const Target& at) {
  constexpr int kRowBytes = kChunkBytes / kChunkTokens, kWarpTokens = 16, kRows = 64;
  const int lane = threadIdx.x % 32;
  const bool half = p.y_dtype == DType::kFloat16;
  const uint32_t tile = buffers + threadIdx.x / 32 * kWarpTokens * kRowBytes;
  const SwappedFactors<K> factor(p, at.tokens);
#pragma unroll
  for (int first = 0; first < K::kTilesM * 8; first += kRows) {
#pragma unroll
    for (int j = 0; j < kRows / 8; j += 2) {
      uint32_t pairs[4];  // tokens 0..7 and 8..15 of eight rows, then of the next eight
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float (&of)[4] = sum[first / 8 + j + i];
        const float2 bias = swapped_bias(p, at.rows, first + (j + i) * 8 + lane % 4 * 2);
        pairs[2 * i] = pack(factor.of[0] * (of[0] + bias.x), factor.of[0] * (of[1] + bias.y), half);
        pairs[2 * i + 1] = pack(factor.of[1] * (of[2] + bias.x), factor.of[1] * (of[3] + bias.y), half);
      }
      ptx::stmatrix_x4(tile + lane % 16 * kRowBytes + (j + lane / 16) * 16, pairs);
    }
    __syncwarp();
    const int n = at.row0 + first + lane % 8 * 8;
#pragma unroll
    for (int i = 0; i < kWarpTokens; i += 4) {
      const int token = i + lane / 8;
      const int64_t m = at.token0 + swapped_token<K>() - lane / 4 + token;
      if (m >= at.token_end || n >= at.row_end) continue;
      store_eight<K>(p, at, m, n, ptx::load_shared_16(tile + token * kRowBytes + lane % 8 * 16));
    }
    __syncwarp();
  }
}

// `of`: this warpgroup's rows, or the tile's if all warpgroups share them.
template <typename K>
__device__ __forceinline__ void write_swapped_result(const Params& p, const float (&sum)[K::kTilesM][4],
                                                     uint32_t buffers, const Target& of) {
  const int other = K::kOwnTokens ? threadIdx.x / 128 : 0;
  Target at = of;
  at.rows -= other * 3 * 64 * 4, at.row0 -= other * 64;
  const bool waits = p.bias != nullptr || K::kGrouped;
  const auto wait = [] {
    ptx::named_barrier(K::kOwnTokens ? 3 : 1 + threadIdx.x / 128, K::kOwnTokens ? K::kConsumerThreads : 128);
  };
  if (waits) wait();
  if (p.y_dtype == DType::kFloat32) {
    write_swapped_float<K>(p, sum, at);
  } else {
    write_swapped_half<K>(p, sum, buffers, at);
  }
  if (waits) wait();  // before the next tile overwrites the parameters
}

}  // namespace qao::gemm::sm90_ws
