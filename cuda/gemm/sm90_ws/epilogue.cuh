// Epilogue: reduction over the cluster for split-K, scaling, and stores of y.
//
// Each of the three variants is instantiated once per kernel.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/finish.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "gemm/sm90_ws/load.cuh"

namespace qao::gemm::sm90_ws {

constexpr int kRowScalesBytes = 3 * 64 * 4;

// Loads the epilogue's parameters into shared memory: scales, sums and bias of each 64 rows of W, [3][64], and, once
// per warpgroup, scales and zero points of the tile's tokens, [2][tokens].
template <typename K>
__device__ __forceinline__ void fetch_row_scales(const Params& p, uint32_t rows, const Place& place, int row0) {
  const int thread = threadIdx.x % 128, row = row0 + thread % 64, expert = of_expert<K>(place, p.n);
  const int in_tiles = of_expert<K>(place, (p.n + int4::kTileN - 1) / int4::kTileN * int4::kTileN) + row;  // packed
  const bool in_weight = row < rows_of<K>(p, place.weight);
  if (thread < 64) {
    if constexpr (K::kWeight == Format::kFp4) {
      if (p.row_scales != nullptr) {
        ptx::store_shared_float(rows + thread * 4, in_weight ? fp4_row_scale(p, in_tiles) : 0.0f);
      }
    } else if constexpr (K::kRowScales) {
      const int at = p.groups > 1 ? expert + row : in_tiles;  // one group per row: read the packed scales
      const float scale = in_weight ? load_float(p.row_scales, at, p.row_scale_dtype) : 0.0f;
      ptx::store_shared_float(rows + thread * 4, scale);
    } else if (p.row_scales != nullptr) {
      const int all = of_expert<K>(place, 1);  // one scale per expert
      const int at = p.row_scale_stride == 0 ? all : in_weight ? expert + row : 0;
      ptx::cp_async_4(rows + thread * 4, p.row_scales + at, in_weight);
    }
  } else {
    if (p.weight_sums != nullptr)
      ptx::cp_async_4(rows + thread * 4, p.weight_sums + (in_weight ? expert + row : 0), in_weight);
    if constexpr (K::kMerged) {
      const void* bias = static_cast<const MergedParams&>(p).of[place.weight].bias;
      ptx::store_shared_float(rows + 256 + thread * 4,
                              in_weight && bias != nullptr ? load_float(bias, row, p.bias_dtype) : 0.0f);
    } else if (p.bias != nullptr) {
      ptx::store_shared_float(rows + 256 + thread * 4,
                              in_weight ? load_float(p.bias, expert + row, p.bias_dtype) : 0.0f);
    }
  }
}
// Loads the row_scale factors of y, stored after scales and zero points.
template <typename K>
__device__ __forceinline__ void fetch_factors(const Routing& r, uint32_t tokens, int64_t token0) {
  for (int i = threadIdx.x % 128; r.row_scale != nullptr && i < K::kTokens; i += 128) {
    const bool exists = token0 + i < r.rows;
    ptx::store_shared_float(tokens + (2 * K::kTokens + i) * 4,
                            exists ? load_float(r.row_scale, token0 + i, r.row_scale_dtype) : 0.0f);
  }
}
template <typename K>
__device__ __forceinline__ void fetch_scales(const Params& p, uint32_t rows, uint32_t tokens, const Place& place,
                                             int row0) {
  const int64_t token0 = first_token<K>(place);
#pragma unroll
  for (int i = 0; i < K::kRowParts; ++i) fetch_row_scales<K>(p, rows + i * kRowScalesBytes, place, row0 + i * 64);
  if constexpr (K::kGrouped) fetch_factors<K>(static_cast<const GroupedParams&>(p).routing, tokens, token0);
  for (int i = threadIdx.x % 128; !K::kFloatX && i < K::kTokens; i += 128) {
    const bool exists = token0 + i < p.m;
    const int64_t token = exists ? token0 + i : 0;
    if (p.x_scales != nullptr) ptx::cp_async_4(tokens + i * 4, p.x_scales + token * p.x_scale_stride, exists);
    if (p.x_zeros != nullptr) ptx::cp_async_4(tokens + (K::kTokens + i) * 4, p.x_zeros + token, exists);
  }
  ptx::cp_async_commit();
}
// Call before reading the scales.
__device__ __forceinline__ void wait_for_scales(int warpgroup) {
  ptx::cp_async_wait<0>();
  ptx::named_barrier(1 + warpgroup, 128);
}

// Parameters of `count` rows of one thread: `row` and every `step`-th row after it. `scaled_x`: x has scales.
template <bool scaled_x, int count, int step>
struct Rows {
  float scale[count], weight_sum[count], bias[count];

  __device__ __forceinline__ Rows(const Params& p, uint32_t rows, int row) {
#pragma unroll
    for (int e = 0; e < count; ++e) {
      const uint32_t at = rows + (row + e * step) * 4;
      scale[e] = p.row_scales != nullptr ? p.factor * ptx::load_shared_float(at) : p.factor;
      weight_sum[e] = p.weight_sums != nullptr ? ptx::load_shared_float(at + 256) : 0.0f;
      bias[e] = p.bias != nullptr ? ptx::load_shared_float(at + 512) : 0.0f;
    }
  }
  __device__ __forceinline__ float finish(int e, float sum, float x_scale, float x_zero) const {
    if constexpr (!scaled_x) return scale[e] * sum + bias[e];
    return finished(sum, scale[e], x_scale, x_zero, weight_sum[e], bias[e]);
  }
};

// Scale and zero point of two adjacent tokens.
template <typename K>
struct Tokens {
  float2 scale = {1, 1}, zero = {0, 0}, factor = {1, 1};

  __device__ __forceinline__ Tokens(const Params& p, uint32_t tokens, int token) {
    if constexpr (K::kGrouped) {
      if (static_cast<const GroupedParams&>(p).routing.row_scale != nullptr) {
        factor = ptx::load_shared_float2(tokens + (2 * K::kTokens + token) * 4);
      }
    }
    if constexpr (K::kFloatX) return;
    if (p.x_scales != nullptr) scale = ptx::load_shared_float2(tokens + token * 4);
    if (p.x_zeros != nullptr) {
      zero.x = static_cast<float>(ptx::load_shared_int(tokens + (K::kTokens + token) * 4));
      zero.y = static_cast<float>(ptx::load_shared_int(tokens + (K::kTokens + token) * 4 + 4));
    }
  }
};
// Output range of one warpgroup: rows [row0, row_end) of W, at most 64, and tokens [token0, token_end), clipped to the
// tile. `rows` and `tokens` are shared addresses of the parameters loaded by fetch_scales.
struct Target {
  uint32_t rows, tokens;
  int64_t token0, token_end;
  int row0, row_end;
  int split_k, weight;  // see Place
};

// Split-K: writes the tile transposed into `tiles`; then every CTA of the cluster reduces and stores its share of the
// tokens. int32 partial sums are added as integers, so that y does not depend on the split.
template <typename K, typename Sum>
__device__ __forceinline__ void write_split_result(const Params& p, const Sum (&sum)[K::kTilesM][4], uint32_t tiles,
                                                   const Target& at) {
  constexpr int kBatch = 4;  // tokens per thread and iteration
  const int thread = threadIdx.x % 128, lane = thread % 32, rank = ptx::cluster_rank();
  const uint32_t tile = tiles + threadIdx.x / 128 * K::kTokens * kPaddedN * 4;
  const int row = thread % 16 * 4, n = at.row0 + row;
  // Store partial sums in shared memory
  ptx::cp_async_wait<0>();  // of fetch_scales
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int column = j * 8 + lane % 4 * 2 + e % 2, row = thread / 32 * 16 + lane / 4 + e / 2 * 8;
      uint32_t to = tile + (column * kPaddedN + row) * 4;
      if constexpr (K::kOwnTokens) {
        to = tiles + ((column / 64 * K::kTokens + threadIdx.x / 128 * 64 + row) * kPaddedN + column % 64) * 4;
      } else if constexpr (K::kSwapped) {
        to = tile + (row * kPaddedN + column) * 4;
      }
      ptx::store_shared_float(to, as_part(sum[j][e]));
    }
  }
  ptx::cluster_barrier();
  // Reduce over the cluster
  const Rows<!K::kFloatX, 4, 1> rows(p, at.rows, row);
  const int end =
      static_cast<int>(min(static_cast<int64_t>((rank + 1) * K::kTokens / at.split_k), at.token_end - at.token0));
#pragma unroll 1
  for (int first = rank * K::kTokens / at.split_k + thread / 16; first < end && n < at.row_end; first += 8 * kBatch) {
    Sum total[kBatch][4] = {};
#pragma unroll 2
    for (int r = 0; r < at.split_k; ++r) {
      float4 part[kBatch];
      const auto read = [&](uint32_t from, auto load) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) part[i] = load(from + min(first + 8 * i, K::kTokens - 1) * (kPaddedN * 4));
      };
      if (r == rank) {  // local shared memory, not through the cluster network
        read(tile + row * 4, ptx::load_shared_float4);
      } else {
        read(ptx::cluster_address(tile + row * 4, r), ptx::load_cluster_float4);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        add_part(total[i][0], part[i].x), add_part(total[i][1], part[i].y);
        add_part(total[i][2], part[i].z), add_part(total[i][3], part[i].w);
      }
    }
    // Scale and store
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int token = first + 8 * i;
      if (token >= end) break;
      float x_scale = 1, x_zero = 0;
      if (!K::kFloatX && p.x_scales != nullptr) x_scale = ptx::load_shared_float(at.tokens + token * 4);
      if (!K::kFloatX && p.x_zeros != nullptr) {
        x_zero = static_cast<float>(ptx::load_shared_int(at.tokens + (K::kTokens + token) * 4));
      }
      float y[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) y[e] = rows.finish(e, static_cast<float>(total[i][e]), x_scale, x_zero);
      const int rows_of_w = rows_of<K>(p, at.weight);
      const int64_t to = (at.token0 + token) * rows_of_w + n;
      if (rows_of_w % 4 == 0) {
        store_float4(y_of<K>(p, at.weight), to, p.y_dtype, y);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (n + e < at.row_end) store_float(y_of<K>(p, at.weight), to + e, p.y_dtype, y[e]);
        }
      }
    }
  }
  ptx::cluster_arrive();  // keeps the shared memory of this CTA alive until all have read it
  ptx::cluster_wait();
}

// Stores a tile as float32. Eight lanes hold adjacent rows: 32 bytes of y.
template <typename K, typename Sum>
__device__ __forceinline__ void write_float_result(const Params& p, const Sum (&sum)[K::kTilesM][4], const Target& at) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, n = at.row0 + row;
  wait_for_scales(threadIdx.x / 128);
  const Rows<!K::kFloatX, 2, 8> rows(p, at.rows, row);
  float* y = static_cast<float*>(p.y) + (at.token0 + lane % 4 * 2) * p.n + n;
  const int64_t count = at.token_end - at.token0 - lane % 4 * 2;
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
    const Tokens<K> x(p, at.tokens, j * 8 + lane % 4 * 2);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      float value = rows.finish(e / 2, static_cast<float>(sum[j][e]), e % 2 == 0 ? x.scale.x : x.scale.y,
                                e % 2 == 0 ? x.zero.x : x.zero.y);
      if constexpr (K::kGrouped) value *= e % 2 == 0 ? x.factor.x : x.factor.y;
      if (j * 8 + e % 2 < count && n + e / 2 * 8 < at.row_end)
        y[static_cast<int64_t>(j * 8 + e % 2) * p.n + e / 2 * 8] = value;
    }
  }
  ptx::named_barrier(1 + threadIdx.x / 128, 128);  // before the scales are overwritten
}

// Stores the scaled sums of a slice of K, without the bias.
template <typename K, typename Sum>
__device__ __forceinline__ void write_slice(const Params& p, const Sum (&sum)[K::kTilesM][4], const Target& at,
                                            int slice) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + lane / 4, n = at.row0 + row;
  wait_for_scales(threadIdx.x / 128);
  const Rows<!K::kFloatX, 2, 8> rows(p, at.rows, row);
  const int64_t token0 = at.token0 + lane % 4 * 2, count = at.token_end - token0;
  float* to = p.partials + (slice * p.m + token0) * p.n + n;
#pragma unroll
  for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (j * 8 + e % 2 >= count || n + e / 2 * 8 >= at.row_end) continue;
      to[static_cast<int64_t>(j * 8 + e % 2) * p.n + e / 2 * 8] = rows.scale[e / 2] * static_cast<float>(sum[j][e]);
    }
  }
  ptx::named_barrier(1 + threadIdx.x / 128, 128);  // before the scales are overwritten
}

__device__ __forceinline__ uint32_t pack(float low, float high, bool half) {
  const __half2 halves = __floats2half2_rn(low, high);
  const __nv_bfloat162 bfloats = __floats2bfloat162_rn(low, high);
  return half ? *reinterpret_cast<const uint32_t*>(&halves) : *reinterpret_cast<const uint32_t*>(&bfloats);
}

// Stores eight adjacent 16-bit rows of one token.
template <typename K>
__device__ __forceinline__ void store_eight(const Params& p, const Target& at, int64_t token, int n,
                                            const uint4& eight) {
  const int rows = rows_of<K>(p, at.weight);
  uint16_t* y = static_cast<uint16_t*>(y_of<K>(p, at.weight)) + token * rows + n;
  if (rows % 8 == 0) {
    *reinterpret_cast<uint4*>(y) = eight;
    return;
  }
  const uint32_t word[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    if (n + e < at.row_end) y[e] = static_cast<uint16_t>(word[e / 2] >> e % 2 * 16);
  }
}

// Address of eight rows of W of one token in a chunk of y: padded, or in the TMA swizzle.
template <typename K>
__device__ __forceinline__ uint32_t y_address(uint32_t chunk, int token, int eight) {
  constexpr int kTokenBytes = K::kStage.chunk_bytes / kChunkTokens;
  return chunk + token * kTokenBytes + ((K::kPingPong ? eight ^ token % 8 : eight) << 4);
}

// Gated: the warpgroups of up pass their sums through the buffers of y to those of gate, which return true.
template <typename K, typename Sum>
__device__ __forceinline__ bool apply_gate(const Params& p, Sum (&sum)[K::kTilesM][4], uint32_t buffers,
                                           uint32_t of_rows) {
  constexpr int kPairs = K::kWarpgroups / 2, kTiles = kChunkTokens / 8, kFirstBarrier = 2 + K::kWarpgroups;
  constexpr int kBufferBytes = K::kStage.chunks * K::kStage.chunk_bytes;
  static_assert(K::kWarpgroups % 2 == 0 && kTiles * 4 * 128 * 4 <= kBufferBytes);
  const int thread = threadIdx.x % 128, warpgroup = threadIdx.x / 128, pair = warpgroup % kPairs;
  const bool is_gate = warpgroup < kPairs;
  wait_for_scales(warpgroup);
  const Rows<!K::kFloatX, 2, 8> rows(p, of_rows, thread / 32 * 16 + thread % 32 / 4);
  const uint32_t place = buffers + (kPairs + pair) * kBufferBytes + thread * 4;
#pragma unroll
  for (int chunk = 0; chunk < K::kTokens / kChunkTokens; ++chunk) {
    const auto each = [&](auto use) {
#pragma unroll
      for (int i = 0; i < kTiles * 4; ++i) use(sum[chunk * kTiles + i / 4][i % 4], i % 4 / 2, place + i * 128 * 4);
    };
    if (!is_gate) each([&](Sum up, int e, uint32_t at) { ptx::store_shared_float(at, rows.finish(e, up, 1, 0)); });
    ptx::named_barrier(kFirstBarrier + pair, 256);
    if (is_gate) {
      each([&](Sum& gate, int e, uint32_t at) {
        const float x = rows.finish(e, gate, 1, 0);
        gate = __fdividef(x, 1 + expf(-x)) * ptx::load_shared_float(at);
      });
    }
    ptx::named_barrier(kFirstBarrier + pair, 256);
  }
  return is_gate;
}

// Stores a tile as 16-bit values, in chunks of tokens through multiple buffers: scaled in registers, transposed by
// stmatrix, then stored eight rows of W at a time or by TMA. TMA may still read shared memory on return.
template <typename K, typename Sum>
__device__ __forceinline__ void write_half_result(const Params& p, const CUtensorMap& y_map,
                                                  const Sum (&sum)[K::kTilesM][4], uint32_t buffers, const Target& at) {
  constexpr int kBuffers = K::kStage.chunks;
  const int thread = threadIdx.x % 128, lane = thread % 32, warp = thread / 32, warpgroup = threadIdx.x / 128;
  const bool half = K::kFloatX ? std::is_same_v<typename K::T, __half> : p.y_dtype == DType::kFloat16;
  const bool copies = K::kPingPong && p.copies_y;
  if (copies) tma::wait_for_stores<0>();  // of the previous tile
  wait_for_scales(warpgroup);
  const Rows<!K::kFloatX, 2, 8> rows(p, at.rows, warp * 16 + lane / 4);
#pragma unroll
  for (int chunk = 0; chunk < K::kTokens / kChunkTokens; ++chunk) {
    const uint32_t tile = buffers + (warpgroup * kBuffers + chunk % kBuffers) * K::kStage.chunk_bytes;
    // Scale and transpose
#pragma unroll
    for (int j = 0; j < kChunkTokens / 8; j += 2) {
      uint32_t pairs[4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int eight = chunk * (kChunkTokens / 8) + j + i;
        const Tokens<K> x(p, at.tokens, eight * 8 + lane % 4 * 2);
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          float low = static_cast<float>(sum[eight][2 * high]), next = static_cast<float>(sum[eight][2 * high + 1]);
          if constexpr (!K::kGated) {
            low = rows.finish(high, low, x.scale.x, x.zero.x), next = rows.finish(high, next, x.scale.y, x.zero.y);
          }
          if constexpr (K::kGrouped) low *= x.factor.x, next *= x.factor.y;
          pairs[2 * i + high] = pack(low, next, half);
        }
      }
      const int token = (j + lane / 16) * 8 + lane % 8;
      ptx::stmatrix_x4_transposed(y_address<K>(tile, token, warp * 2 + lane / 8 % 2), pairs);
    }
    if (copies) {
      tma::fence_stores();
      if (chunk + 1 >= kBuffers) tma::wait_for_stores<kBuffers - 2>();  // the buffer of the next chunk
    }
    ptx::named_barrier(1 + warpgroup, 128);
    // Store the chunk
    const int64_t token0 = at.token0 + chunk * kChunkTokens;
    const bool whole = !K::kGrouped || token0 + kChunkTokens <= at.token_end;  // else the next expert follows
    if (copies) {
      if (whole && thread == 0 && at.row0 < at.row_end) {
        tma::store_3d(&y_map, tile, at.row0, 0, static_cast<int>(token0));
      }
      tma::close_store();  // once per chunk, also if empty, since the wait counts groups
      if (whole) continue;
    }
    const int n = at.row0 + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < kChunkTokens / 16; ++i) {
      const int token = thread / 8 + i * 16;
      if (token0 + token >= at.token_end || n >= at.row_end) continue;
      store_eight<K>(p, at, token0 + token, n, ptx::load_shared_16(y_address<K>(tile, token, thread % 8)));
    }
  }
  ptx::named_barrier(1 + warpgroup, 128);  // before the buffers are reused
}

}  // namespace qao::gemm::sm90_ws
