// In-kernel quantization of x for a few tokens (ResidentX in tile.h).
// Every CTA does it while its first K-tiles of W load.
//
//   floats in shared memory  ->  range of each token  ->  q in K-tiles, and the parameters of x for the epilogue
//
// Warps t, t + P, t + 2P, ... quantize token t, where P is the number of tokens rounded up to a power of two. Results
// are bit-identical to those of the kernels in quantize/.
#pragma once

#include "common/quantize.cuh"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/smem_access.cuh"

namespace qao::gemm::sm80_mma {

__device__ __forceinline__ ResidentX::TokenState& token_state(const Params& p, uint32_t shared) {
  return *static_cast<ResidentX::TokenState*>(__cvta_shared_to_generic(shared + p.resident_at + p.resident.state_at()));
}
__device__ __forceinline__ Token quantized_token(const Params& p, uint32_t shared, int token) {
  const ResidentX::TokenState& state = token_state(p, shared);
  return {state.scale[token], state.zero[token]};
}

// Issues the copies of the rows of x, zero-filled to the end of the last K-tile.
__device__ __forceinline__ void bring_floats(const Params& p, uint32_t to) {
  const int valid = p.k * size_of(p.x_dtype);
  const uint8_t* row = p.x;
  for (int token = 0; token < p.resident.tokens; ++token, row += p.x_stride, to += p.float_row_bytes) {
    for (int at = threadIdx.x * 16; at < p.float_row_bytes; at += blockDim.x * 16) {
      if (at + 16 <= valid || at >= valid) {
        ptx::cp_async_16(to + at, at < valid ? row + at : row, at < valid);
      } else {
        alignas(16) uint16_t halves[8];
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          halves[i] = at + 2 * i < valid ? reinterpret_cast<const uint16_t*>(row + at)[i] : uint16_t{0};
        }
        ptx::store_shared_16(to + at, *reinterpret_cast<const uint4*>(halves));
      }
    }
  }
}

// Several vectors of a row at once hide each other's latency.
constexpr int kBatch = 2;
using Values = float[kBatch][quantize::kVector];

template <DType dtype>
__device__ __forceinline__ void load_floats(uint32_t row, const int (&vector)[kBatch], Values& value) {
  quantize::Packed<dtype> packed[kBatch];
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
#pragma unroll
    for (int i = 0; i < packed[b].kParts; ++i) {
      packed[b].part[i] = ptx::load_shared_16(row + vector[b] * quantize::kVector * size_of(dtype) + 16 * i);
    }
  }
#pragma unroll
  for (int b = 0; b < kBatch; ++b) packed[b].unpack(value[b]);
}
__device__ __forceinline__ void load_floats(const Params& p, uint32_t row, const int (&vector)[kBatch], Values& value) {
  if (p.x_dtype == DType::kBFloat16) {
    load_floats<DType::kBFloat16>(row, vector, value);
  } else if (p.x_dtype == DType::kFloat16) {
    load_floats<DType::kFloat16>(row, vector, value);
  } else {
    load_floats<DType::kFloat32>(row, vector, value);
  }
}

// All threads of the CTA must call this. `int4_weight`: columns in int4 tile order, and sums of x per group.
template <Format format, bool int4_weight>
__device__ __forceinline__ void quantize_tokens(const Params& p, uint32_t floats, uint32_t shared) {
  using namespace quantize;
  constexpr int kTileVectors = kTileK / kVector, kWarpTiles = 32 / kTileVectors;  // K-tiles that a warp handles at once
  constexpr bool kFp8 = format == Format::kFp8;
  const Target target{kFp8, kFp8 || p.epilogue.weight_sums == nullptr, p.k};
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int tokens = p.resident.tokens, token_bits = 32 - __clz(tokens - 1);
  const int token = warp & ((1 << token_bits) - 1), share = warp >> token_bits, shares = warps >> token_bits;
  const int tiles = token < tokens ? p.k_tiles : 0;
  const int lane_tile = lane / kTileVectors, lane_vector = lane % kTileVectors;
  const uint32_t row = floats + token * p.float_row_bytes;
  ResidentX::TokenState& state = token_state(p, shared);

  // The lane's K-tiles of an iteration. Those past the end read the last one.
  int tile[kBatch];
  Values value;
  const auto load = [&](int first) {
    int vector[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      tile[b] = first + b * shares * kWarpTiles + lane_tile;
      vector[b] = min(tile[b], tiles - 1) * kTileVectors + lane_vector;
    }
    load_floats(p, row, vector, value);
  };
  const int begin = share * kWarpTiles, step = kBatch * shares * kWarpTiles;

  // Compute the range and scale of each token
  Rounding rounding;
  float scale = 1;
  if (p.given_scale != nullptr) {
    scale = *p.given_scale;
    rounding = rounding_of(scale);
  } else if (p.x_scaling != Scaling::kBlock) {
    Range range;
    for (int first = begin; first < tiles; first += step) {
      load(first);
#pragma unroll
      for (int b = 0; b < kBatch; ++b) range.add(value[b], target.symmetric);
    }
    range = {__reduce_max_sync(~0u, range.high), __reduce_max_sync(~0u, range.below)};
    if (lane == 0) state.high[warp] = range.high, state.below[warp] = range.below;
    __syncthreads();
    const bool same_token = lane < warps && (lane & ((1 << token_bits) - 1)) == token;
    range = {__reduce_max_sync(~0u, same_token ? state.high[lane] : 0),
             __reduce_max_sync(~0u, same_token ? state.below[lane] : 0)};
    rounding = rounding_of(range, target, &scale);
  }
  if (share == 0 && lane == 0 && token < tokens) state.scale[token] = scale, state.zero[token] = rounding.zero;

  // Addresses of the lane's q and of its parameter in K-tile 0.
  const int group_lanes = p.tile_groups > 1 ? kTileVectors / p.tile_groups : kTileVectors << p.group_shift;
  const int tile_bytes = tokens * kTileK, parameter_distance = p.resident.token_stride() * 4;
  const uint32_t x = shared + p.resident_at;
  const uint32_t q = x + swizzled<kTileK>(token, lane_vector / 2) + lane_vector % 2 * kVector;
  const uint32_t parameter = x + p.resident.parameters_at() + token * 4 +
                             (p.tile_groups > 1 ? lane_vector / group_lanes * parameter_distance : 0);
  const int tile_parameters = p.resident.tile_parameters * parameter_distance;
  // Quantize, and store q and the parameters
  int64_t row_sum[1] = {0};
  for (int first = begin; first < tiles; first += step) {
    load(first);
    uint2 word[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (kFp8 && !int4_weight && p.x_scaling == Scaling::kBlock) {
        Range range;
        range.add(value[b], true);
        uint32_t largest = range.high;
#pragma unroll
        for (int other = 1; other < kTileVectors; other *= 2) {
          largest = max(largest, __shfl_xor_sync(~0u, largest, other));
        }
        const float block_scale = scale_of(largest, kLargestFp8);
        rounding = rounding_of(block_scale);
        if (lane_vector == 0 && tile[b] < tiles) {
          ptx::store_shared_float(parameter + tile[b] * tile_parameters, block_scale);
        }
      }
      word[b] = round_vector(target, rounding, value[b], (tile[b] * kTileVectors + lane_vector) * kVector);  // 0 past K
    }
    if constexpr (int4_weight) {
      float sum[kBatch];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) sum[b] = sum_of(target, word[b]);
      if (p.groups == 1) {
#pragma unroll
        for (int b = 0; b < kBatch; ++b) row_sum[0] += to_units(target, sum[b]);
      } else {
        sum_over_lanes(sum, group_lanes);
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
          if ((lane & (group_lanes - 1)) == 0 && tile[b] < tiles) {
            ptx::store_shared_float(parameter + tile[b] * tile_parameters, sum[b]);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) word[b] = int4_tile_order(word[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (tile[b] < tiles) ptx::store_shared_8(q + tile[b] * tile_bytes, word[b]);
    }
  }
  // Reduce the sum of x over the whole row
  if (!int4_weight || p.groups > 1) return;
  sum_over_lanes(row_sum, 32);
  if (lane == 0) state.sum[warp] = row_sum[0];
  __syncthreads();
  if (share > 0 || lane > 0 || token >= tokens) return;
  row_sum[0] = 0;
  for (int other = 0; other < shares; ++other) row_sum[0] += state.sum[token + (other << token_bits)];
  ptx::store_shared_float(parameter, from_units(target, row_sum[0]));
}

}  // namespace qao::gemm::sm80_mma
