// Which part of the product a CTA of the body for few tokens computes, and how its operands come to shared memory.
#pragma once

#include <cuda_bf16.h>

#include <climits>

#include "common/ptx.cuh"
#include "int4_mm/decode_common.cuh"
#include "int4_mm/kernels.h"
#include "int4_mm/layout.h"
#include "int4_mm/tile.h"

namespace qao::int4_mm::decode {

using T = __nv_bfloat16;

template <typename Tile>
struct Cta {
  static constexpr int kR = Tile::kTilesN, kTM = Tile::kTilesM;
  const Params& p;
  const DecodeParams& d;
  const int lane, slice;
  const int rank;                  // among the CTAs that share row tiles
  const int row_tile0, row_tiles;  // of the CTA
  const int begin, steps;          // K-steps of the CTA
  const uint32_t ring, partials;   // shared addresses

  // The same in all lanes, and known to be so.
  static __device__ __forceinline__ int warp() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0); }

  __device__ __forceinline__ Cta(const Params& params, const DecodeParams& decode, uint32_t shared)
      : p(params),
        d(decode),
        lane(threadIdx.x % 32),
        slice(warp()),
        rank(blockIdx.x),
        row_tile0(blockIdx.y * d.row_tiles + min(static_cast<int>(blockIdx.y), d.more_row_tiles)),
        row_tiles(d.row_tiles + (static_cast<int>(blockIdx.y) < d.more_row_tiles)),
        begin(rank * d.steps + min(rank, d.more_steps)),
        steps(d.steps + (rank < d.more_steps)),
        ring(shared + slice * d.stages * d.stage_bytes),
        partials(shared + Tile::kWarps * d.stages * d.stage_bytes) {}

  static constexpr int kRowsAtOnce = 2;  // tokens that a warp copies together

  // Where in a stage this lane's share goes.
  struct Places {
    uint32_t weight, scales, x;
    int scale_tile, second_scale_tile;  // row tiles of the parameters
  };
  __device__ __forceinline__ Places places() const {
    const int chunk = lane & ((1 << d.chunk_shift) - 1), tile = lane >> d.chunk_shift;
    const int second = tile + (32 >> d.chunk_shift);
    return {static_cast<uint32_t>(lane * 16),
            static_cast<uint32_t>(d.scale_offset + tile * d.groups_of_step * p.group_bytes + chunk * 16),
            d.x_offset + x_offset(lane / 16, lane % 16), tile < kR ? tile : INT_MAX, second < kR ? second : INT_MAX};
  }

  // Walks the K-steps of this slice, pass after pass, with this thread's pointers.
  struct Cursor {
    int pass, step, k_step;
    int tiles;  // row tiles that the CTA has left; none past the last pass
    const uint8_t *weight, *scales;
    const T* x;
  };
  __device__ __forceinline__ void seek(Cursor& at) const {
    while (at.step >= steps) {
      at.step -= steps;
      if (++at.pass == d.passes) {
        at.k_step = INT_MAX / 2;
        return;
      }
    }
    at.k_step = begin + at.step;
    const int tile = at.pass * kR, chunk = lane & ((1 << d.chunk_shift) - 1);
    at.tiles = row_tiles - tile;
    const int row_tile = row_tile0 + tile;
    at.weight = p.weight + row_tile * d.row_tile_bytes + at.k_step * kStepBytes + lane * 16;
    at.scales = p.scales + (row_tile + (lane >> d.chunk_shift)) * d.row_tile_scale_bytes + chunk * 16;
    at.x = static_cast<const T*>(p.x) + lane / 16 * p.x_stride + at.k_step * kStepColumns + lane % 16 * 8;
  }
  __device__ __forceinline__ Cursor first() const {
    Cursor at{0, slice};
    seek(at);
    return at;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.step += Tile::kWarps;
    at.k_step += Tile::kWarps;
    at.weight += Tile::kWarps * kStepBytes;
    at.x += Tile::kWarps * kStepColumns;
    if (at.pass != d.passes && at.step >= steps) seek(at);
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const { return ring + stage * d.stage_bytes; }

  // Starts copying a K-step: two K-tiles of each row tile, the parameters of the groups they touch, and x.
  __device__ __forceinline__ void fetch(const Cursor& at, const Places& places, uint32_t stage) const {
    if (at.k_step >= d.plain_steps) {
      if (at.pass < d.passes) {
        fetch_slowly(p, d, at.k_step, at.tiles, at.weight, at.scales, at.x, stage + places.weight, stage);
      }
      return;
    }
    const uint8_t* weight = at.weight;
    const uint32_t to = stage + places.weight;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      if (i < at.tiles) {
        ptx::cp_async_16(to + i * kStepBytes, weight);
        ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
      }
      weight += d.row_tile_bytes;
    }
    if (places.scale_tile < at.tiles) {
      const uint8_t* scales = at.scales + (at.k_step * d.groups_of_step >> d.group_shift) * p.group_bytes;
      ptx::cp_async_16(stage + places.scales, scales);
      if (places.second_scale_tile < at.tiles) {
        ptx::cp_async_16(stage + places.scales + 512, scales + (32 >> d.chunk_shift) * d.row_tile_scale_bytes);
      }
    }
    const T* x = at.x;
#pragma unroll
    for (int i = 0; i * kRowsAtOnce < Tile::kTokens; ++i) {
      if (i > 0 && i * kRowsAtOnce >= d.tokens) break;
      if (lane / 16 + i * kRowsAtOnce < d.tokens) {
        ptx::cp_async_16(((stage + places.x) ^ (i * kRowsAtOnce % 8 << 4)) + i * kRowsAtOnce * kStepColumns * 2, x);
      }
      x += kRowsAtOnce * p.x_stride;
    }
  }
  // Any step: one that ends past K, of groups that take more than 64 chunks of parameters, of an x that 16-byte loads
  // cannot read. Kept out of the main loop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const DecodeParams& d, int k_step, int tiles_left,
                                                   const uint8_t* weight, const uint8_t* scales, const T* x,
                                                   uint32_t to, uint32_t stage) {
    const int lane = threadIdx.x % 32;
    const int tiles = min(tiles_left, kR);
    for (int tile = 0; tile < tiles; ++tile) {
      const uint8_t* from = weight + tile * d.row_tile_bytes;
      ptx::cp_async_16(to + tile * kStepBytes, from);
      if (2 * k_step + 1 < p.k_tiles) ptx::cp_async_16(to + tile * kStepBytes + kTileBytes, from + kTileBytes);
    }
    const int offset = (k_step * d.groups_of_step >> d.group_shift) * p.group_bytes;
    const int byte = (lane & ((1 << d.chunk_shift) - 1)) * 16, rows = 32 >> d.chunk_shift;
    const uint8_t* from = scales + offset;
    for (int tile = lane >> d.chunk_shift; tile < tiles; tile += rows, from += rows * d.row_tile_scale_bytes) {
      const uint32_t at_shared = stage + d.scale_offset + tile * d.groups_of_step * p.group_bytes + byte;
      if (offset + byte < d.row_tile_scale_bytes) {
        ptx::cp_async_16(at_shared, from);
      } else {
        ptx::store_shared_16(at_shared, {0, 0, 0, 0});
      }
    }
    const int chunk = lane % 16, columns = p.k - k_step * kStepColumns;
    for (int row = lane / 16; row < d.tokens; row += kRowsAtOnce, x += kRowsAtOnce * p.x_stride) {
      const uint32_t at_shared = stage + d.x_offset + x_offset(row, chunk);
      if (p.x_aligned && (chunk + 1) * 8 <= columns) {
        ptx::cp_async_16(at_shared, x);
        continue;
      }
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = chunk * 8 + i < columns ? x[i] : T(0.0f);
      ptx::store_shared_16(at_shared, *reinterpret_cast<const uint4*>(values));
    }
  }
  // 16-byte chunks of a token's 256 bytes are swizzled: no bank conflicts.
  static __device__ __forceinline__ uint32_t x_offset(int row, int chunk) {
    return row * kStepColumns * 2 + ((chunk ^ (row & 7)) << 4);
  }
};

}  // namespace qao::int4_mm::decode
