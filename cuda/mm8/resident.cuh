// Quantising the x of a few tokens inside the product (ResidentX in tile.h): every CTA does it for itself, while its
// first K-tiles of W are on their way.
//
//   floats in shared memory  ->  range of each token  ->  q in K-tiles, with what else the product needs of x
//
// Warps token, token + tokens, ... have one token. All arithmetic is that of the kernels in quantize/, to the bit.
#pragma once

#include "common/quantize.cuh"
#include "mm8/epilogue.cuh"
#include "mm8/kernels.h"
#include "mm8/swizzle.cuh"

namespace qao::mm8 {

__device__ __forceinline__ ResidentX::TokenState& token_state(const Params& p, uint32_t shared) {
  return *static_cast<ResidentX::TokenState*>(__cvta_shared_to_generic(shared + p.resident_at + p.resident.state_at()));
}
__device__ __forceinline__ Token quantized_token(const Params& p, uint32_t shared, int token) {
  const ResidentX::TokenState& state = token_state(p, shared);
  return {state.scale[token], state.zero[token]};
}

// Starts copying the rows of x, with zeros up to the end of the last K-tile.
__device__ __forceinline__ void bring_floats(const Params& p, uint32_t to) {
  const int valid = p.k * size_of(p.x_dtype);
  const uint8_t* row = p.x;
  for (int token = 0; token < p.resident.tokens; ++token, row += p.x_stride, to += p.float_row_bytes) {
    for (int at = threadIdx.x * 16; at < p.float_row_bytes; at += blockDim.x * 16) {
      ptx::cp_async_16(to + at, at < valid ? row + at : row, max(0, min(valid - at, 16)));
    }
  }
}

template <DType dtype>
__device__ __forceinline__ void load_floats(uint32_t from, float (&value)[quantize::kVector]) {
  quantize::Packed<dtype> packed;
#pragma unroll
  for (int i = 0; i < packed.kParts; ++i) packed.part[i] = ptx::load_shared_16(from + 16 * i);
  packed.unpack(value);
}
// Vector `index` of a row of floats.
__device__ __forceinline__ void load_floats(const Params& p, uint32_t row, int index,
                                            float (&value)[quantize::kVector]) {
  const uint32_t from = row + index * quantize::kVector * size_of(p.x_dtype);
  if (p.x_dtype == DType::kBFloat16) {
    load_floats<DType::kBFloat16>(from, value);
  } else if (p.x_dtype == DType::kFloat16) {
    load_floats<DType::kFloat16>(from, value);
  } else {
    load_floats<DType::kFloat32>(from, value);
  }
}

// All threads of the CTA take part. `int4_weight`: columns in the order of its tiles, and sums of its groups.
template <Format format, bool int4_weight>
__device__ __forceinline__ void quantize_tokens(const Params& p, uint32_t floats, uint32_t shared) {
  using namespace quantize;
  constexpr int kTileVectors = kTileK / kVector;
  constexpr bool kFp8 = format == Format::kFp8;
  const Target target{kFp8, kFp8 || p.epilogue.weight_sums == nullptr, p.k};
  const int tokens = p.resident.tokens, vectors = p.k_tiles * kTileVectors;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
  const int token = warp % tokens, share = warp / tokens, shares = (warps - token + tokens - 1) / tokens;
  const uint32_t row = floats + token * p.float_row_bytes;
  ResidentX::TokenState& state = token_state(p, shared);
  float value[kVector];

  Rounding rounding;
  float scale = 1;
  if (p.scale != nullptr) {
    scale = *p.scale;
    rounding = rounding_of(scale);
  } else if (p.x_scaling != Scaling::kBlock) {
    Range range;
    for (int vector = share * 32 + lane; vector < vectors; vector += shares * 32) {
      load_floats(p, row, vector, value);
      range.add(value, target.symmetric);
    }
    range = {__reduce_max_sync(~0u, range.high), __reduce_max_sync(~0u, range.below)};
    if (lane == 0) state.high[warp] = range.high, state.below[warp] = range.below;
    __syncthreads();
    const bool same_token = lane < warps && lane % tokens == token;
    range = {__reduce_max_sync(~0u, same_token ? state.high[lane] : 0),
             __reduce_max_sync(~0u, same_token ? state.below[lane] : 0)};
    rounding = rounding_of(range, target, &scale);
  }
  if (share == 0 && lane == 0) state.scale[token] = scale, state.zero[token] = rounding.zero;

  const uint32_t x = shared + p.resident_at, parameters = x + p.resident.parameters_at() + token * 4;
  const int parameter_distance = p.resident.token_stride() * 4;
  const int group_lanes = p.tile_groups > 1 ? kTileVectors / p.tile_groups : kTileVectors << p.group_shift;
  int64_t row_sum = 0;
  for (int first = share * 32; first < vectors; first += shares * 32) {  // whole warps
    const int vector = first + lane, tile = vector / kTileVectors;
    const bool exists = vector < vectors;
    if (exists) {
      load_floats(p, row, vector, value);
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) value[i] = 0;
    }
    if (kFp8 && !int4_weight && p.x_scaling == Scaling::kBlock) {
      Range range;
      range.add(value, true);
      uint32_t largest = range.high;
#pragma unroll
      for (int other = 1; other < kTileVectors; other *= 2) {
        largest = max(largest, __shfl_xor_sync(~0u, largest, other));
      }
      const float block_scale = scale_of(largest, kLargestFp8);
      rounding = rounding_of(block_scale);
      if (exists && lane % kTileVectors == 0) {
        ptx::store_shared_float(parameters + tile * parameter_distance, block_scale);
      }
    }
    uint2 word = round_vector(target, rounding, value, vector * kVector);
    if constexpr (int4_weight) {
      const float sum = sum_of(target, word);
      if (p.groups == 1) {
        row_sum += to_units(target, sum);
      } else {
        const float group_sum = sum_over_lanes(sum, group_lanes);
        const int index = p.tile_groups > 1 ? vector / group_lanes : tile;  // a group of 256 has that of its first tile
        if (exists && (lane & (group_lanes - 1)) == 0) {
          ptx::store_shared_float(parameters + index * parameter_distance, group_sum);
        }
      }
      word = int4_tile_order(word);
    }
    if (exists) {
      const int column = vector % kTileVectors * kVector;
      ptx::store_shared_8(x + tile * tokens * kTileK + swizzled<kTileK>(token, column / 16) + column % 16, word);
    }
  }
  if (!int4_weight || p.groups > 1) return;
  row_sum = sum_over_lanes(row_sum, 32);
  if (lane == 0) state.sum[warp] = row_sum;
  __syncthreads();
  if (share > 0 || lane > 0) return;
  row_sum = 0;
  for (int other = token; other < warps; other += tokens) row_sum += state.sum[other];
  ptx::store_shared_float(parameters, from_units(target, row_sum));
}

}  // namespace qao::mm8
