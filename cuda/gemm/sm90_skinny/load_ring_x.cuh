// CTA tile of mainloop_ring_x.cuh, and the cp.async copies of its operands to shared memory.
#pragma once

#include <cuda_bf16.h>

#include "common/ptx.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_skinny::ring_x {

using T = __nv_bfloat16;

template <typename Tile>
struct Cta {
  static constexpr int kR = Tile::kTilesN, kTM = Tile::kTilesM;
  const Params& p;
  const RingXParams& d;
  // Overridden per expert. Modified kernel parameters would be copied to local memory by each thread.
  const uint8_t *weight, *scales;
  int tokens;
  const int lane, slice;
  const int rank;                 // among the CTAs that split K
  int row_tile0, row_tiles;       // of this CTA
  const int begin, steps;         // K-steps of this CTA
  const uint32_t ring, partials;  // shared addresses

  __device__ __forceinline__ Cta(const Params& params, const RingXParams& decode, uint32_t shared)
      : p(params),
        d(decode),
        weight(params.weight),
        scales(params.scales),
        tokens(decode.tokens),
        lane(threadIdx.x % 32),
        slice(ptx::warp_index()),
        rank(blockIdx.x),
        row_tile0(blockIdx.y * d.row_tiles + min(static_cast<int>(blockIdx.y), d.more_row_tiles)),
        row_tiles(d.row_tiles + (static_cast<int>(blockIdx.y) < d.more_row_tiles)),
        begin(rank * d.steps + min(rank, d.more_steps)),
        steps(d.steps + (rank < d.more_steps)),
        ring(shared + slice * d.stages * d.stage_bytes),
        partials(shared + Tile::kWarps * d.stages * d.stage_bytes) {}

  static constexpr int kRowsAtOnce = 2;  // tokens that a warp copies at once

  // Iterates over the K-steps of this warp, pass after pass, with this thread's global pointers.
  struct Cursor {
    int k_step;
    int tiles;  // remaining n-tiles of the CTA; zero or less past the last pass
    const uint8_t *weight, *scales;
    const T* x;
  };
  __device__ __forceinline__ void seek(Cursor& at) const {
    while (at.k_step >= begin + steps) at.k_step -= steps, at.tiles -= kR;
    const int row_tile = row_tile0 + row_tiles - at.tiles;
    at.weight = weight + row_tile * d.row_tile_bytes + at.k_step * kStepBytes + lane * 16;
    at.scales = scales + (row_tile + (lane >> d.chunk_shift)) * d.row_tile_scale_bytes +
                (at.k_step * d.groups_of_step >> d.group_shift) * p.group_bytes +
                (lane & ((1 << d.chunk_shift) - 1)) * 16;
    at.x = static_cast<const T*>(p.x) + lane / 16 * p.x_stride + at.k_step * kStepColumns + lane % 16 * 8;
  }
  __device__ __forceinline__ Cursor first() const {
    Cursor at{begin + slice, row_tiles};
    seek(at);
    return at;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.k_step += Tile::kWarps;
    at.weight += Tile::kWarps * kStepBytes;
    at.scales += d.scale_advance;
    at.x += Tile::kWarps * kStepColumns;
    if (at.k_step >= begin + steps) seek(at);
  }

  __device__ __forceinline__ uint32_t stage_address(int stage) const { return ring + stage * d.stage_bytes; }

  // Issues the copies of a K-step: two K-tiles of each n-tile, scales and zeros of the groups it touches, and x.
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (kTM == 1 && at.tiles <= 0) return;  // saves much time in short mainloops
    if (at.k_step >= d.plain_steps) {
      if (at.tiles > 0) fetch_slowly(p, d, at.k_step, at.tiles, at.weight, at.scales, at.x, stage);
      return;
    }
    fetch_weight(at, stage);
    const T* x = at.x;
    const uint32_t to_x = stage + d.x_offset + x_offset(lane / 16, lane % 16);
    const int rows = at.tiles > 0 ? tokens - lane / 16 : 0;
#pragma unroll
    for (int i = 0; i * kRowsAtOnce < Tile::kTokens; ++i) {
      if (i == 1 && tokens <= kRowsAtOnce) break;
      ptx::cp_async_16_if(i * kRowsAtOnce < rows,
                          (to_x ^ (i * kRowsAtOnce % 8 << 4)) + i * kRowsAtOnce * kStepColumns * 2, x);
      x += kRowsAtOnce * p.x_stride;
    }
  }
  // Copies the weights, scales and zeros of a whole K-step.
  __device__ __forceinline__ void fetch_weight(const Cursor& at, uint32_t stage) const {
    const uint32_t to = stage + lane * 16;
    const uint8_t* weight = at.weight;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      ptx::cp_async_16_if(i < at.tiles, to + i * kStepBytes, weight);
      ptx::cp_async_16_if(i < at.tiles, to + i * kStepBytes + kTileBytes, weight + kTileBytes);
      if (i + 1 < kR) weight += d.row_tile_bytes;
    }
    const int tile = lane >> d.chunk_shift;
    ptx::cp_async_16_if(tile < min(at.tiles, kR), to + d.scale_offset, at.scales);
    if (kR << d.chunk_shift > 32) {  // a lane copies two chunks
      const int tiles = 32 >> d.chunk_shift;
      ptx::cp_async_16_if(tile + tiles < min(at.tiles, kR), to + d.scale_offset + 512,
                          at.scales + tiles * d.row_tile_scale_bytes);
    }
  }
  // Copies any K-step: one that ends past K, one with more than 64 chunks of scales, or x that is not 16-byte aligned.
  // Kept out of the mainloop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const RingXParams& d, int k_step, int tiles_left,
                                                   const uint8_t* weight, const uint8_t* scales, const T* x,
                                                   uint32_t stage) {
    fetch_weight_slowly(p, d, k_step, tiles_left, weight, scales, stage);
    const int lane = threadIdx.x % 32;
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
  static __device__ __forceinline__ void fetch_weight_slowly(const Params& p, const RingXParams& d, int k_step,
                                                             int tiles_left, const uint8_t* weight,
                                                             const uint8_t* scales, uint32_t stage) {
    const int lane = threadIdx.x % 32;
    const int tiles = min(tiles_left, kR);
    const uint32_t to = stage + lane * 16;
    for (int tile = 0; tile < tiles; ++tile) {
      const uint8_t* from = weight + tile * d.row_tile_bytes;
      ptx::cp_async_16(to + tile * kStepBytes, from);
      if (2 * k_step + 1 < p.k_tiles) ptx::cp_async_16(to + tile * kStepBytes + kTileBytes, from + kTileBytes);
    }
    const int offset = (k_step * d.groups_of_step >> d.group_shift) * p.group_bytes;
    const int byte = (lane & ((1 << d.chunk_shift) - 1)) * 16, rows = 32 >> d.chunk_shift;
    const uint8_t* from = scales;
    for (int tile = lane >> d.chunk_shift; tile < tiles; tile += rows, from += rows * d.row_tile_scale_bytes) {
      const uint32_t at_shared = stage + d.scale_offset + tile * d.groups_of_step * p.group_bytes + byte;
      if (offset + byte < d.row_tile_scale_bytes) {
        ptx::cp_async_16(at_shared, from);
      } else {
        ptx::store_shared_16(at_shared, {0, 0, 0, 0});
      }
    }
  }
  // The 16-byte chunks of a token's 256 bytes are swizzled against bank conflicts.
  static __device__ __forceinline__ uint32_t x_offset(int row, int chunk) {
    return row * kStepColumns * 2 + ((chunk ^ (row & 7)) << 4);
  }
};

}  // namespace qao::gemm::sm90_skinny::ring_x
