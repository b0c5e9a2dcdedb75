// Which part of the product a CTA of the body for 9 to 16 tokens computes, and how its operands come to shared memory.
#pragma once

#include <cuda_bf16.h>

#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "int4_mm/decode_common.cuh"
#include "int4_mm/kernels.h"
#include "int4_mm/layout.h"
#include "int4_mm/tile.h"

namespace qao::int4_mm::batch {

using T = __nv_bfloat16;

template <typename Tile>
struct Cta {
  static constexpr int kR = Tile::kTilesN, kTM = Tile::kTilesM;
  const Params& p;
  const BatchParams& d;
  const int lane, warp, rank;      // rank: of the CTA in its cluster
  const int slice, warp_n;         // of a warp that multiplies
  const int row_tile0, row_tiles;  // of the CTA
  const int begin, steps;          // K-steps of the CTA
  const uint32_t shared, ring;

  __device__ __forceinline__ Cta(const Params& params, const BatchParams& batch, uint32_t base)
      : p(params),
        d(batch),
        lane(threadIdx.x % 32),
        warp(__shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0)),
        rank(blockIdx.x),
        slice(warp / d.warps_n),
        warp_n(warp % d.warps_n),
        row_tile0(blockIdx.y * d.row_tiles + min(static_cast<int>(blockIdx.y), d.more_row_tiles)),
        row_tiles(d.row_tiles + (static_cast<int>(blockIdx.y) < d.more_row_tiles)),
        begin(rank * d.steps + min(rank, d.more_steps)),
        steps(d.steps + (rank < d.more_steps)),
        shared(base),
        ring(base + d.ring_offset + warp * Tile::kStages * d.stage_bytes) {}

  __device__ __forceinline__ uint32_t full(int slot) const { return shared + slot * 16; }
  __device__ __forceinline__ uint32_t empty(int slot) const { return shared + slot * 16 + 8; }
  // [half of the K-step's columns][token], swizzled for wgmma; sums over groups [group][token]. Tokens that do not
  // exist may be anything.
  static constexpr int kHalfBytes = Tile::kTokens * kStepColumns;
  __device__ __forceinline__ uint32_t x_stage(int slot) const { return shared + kBatchX + slot * (2 * kHalfBytes); }
  __device__ __forceinline__ uint32_t x_sums(int slot) const {
    return shared + d.x_sums_offset + slot * d.groups_of_step * (Tile::kTokens * 4);
  }

  // ---- x, by the warps that do not multiply; each brings whole K-steps.

  struct Place {  // a K-step's in the ring of x
    int slot, round;
  };
  __device__ __forceinline__ void move(Place& at, int steps_on) const {
    at.slot += steps_on;
    if (at.slot >= d.x_stages) at.slot -= d.x_stages, ++at.round;
  }

  // Half a warp has a token's columns, this lane eight of them.
  using Values = uint4[Tile::kTokens / 2];
  __device__ __forceinline__ void load_x(int step, Values& v) const {
    if (step >= steps) return;
    const T* from = static_cast<const T*>(p.x) + lane / 16 * p.x_stride + (begin + step) * kStepColumns + lane % 16 * 8;
    const bool plain = begin + step < d.plain_x_steps;
    if (plain) {
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 2; ++i) {
        if (2 * i + 1 < d.tokens || 2 * i + lane / 16 < d.tokens) v[i] = *reinterpret_cast<const uint4*>(from);
        from += 2 * p.x_stride;
      }
    } else {
      const int columns = p.k - (begin + step) * kStepColumns - lane % 16 * 8;
#pragma unroll
      for (int i = 0; i < Tile::kTokens / 2; ++i) {
        if (2 * i + lane / 16 < d.tokens) v[i] = load_slowly(columns, from);
        from += 2 * p.x_stride;
      }
    }
  }
  // Zeros past K, an x that 16-byte loads cannot read.
  static __device__ __noinline__ uint4 load_slowly(int columns, const T* from) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < columns) words[i / 2] |= static_cast<uint32_t>(__bfloat16_as_ushort(from[i])) << (i % 2 * 16);
    }
    return {words[0], words[1], words[2], words[3]};
  }
  __device__ __forceinline__ void store_x(uint32_t stage, const Values& v) const {
    const int odd = lane / 16, chunk = lane % 8 ^ odd;
    const uint32_t to = stage + lane % 16 / 8 * kHalfBytes + odd * 128 + chunk * 16;
#pragma unroll
    for (int i = 0; i < Tile::kTokens / 2; ++i) {
      ptx::store_shared_16((to ^ (2 * i % 8 << 4)) + 2 * i * 128,
                           {scale_x(v[i].x), scale_x(v[i].y), scale_x(v[i].z), scale_x(v[i].w)});
    }
  }
  // By products with ones.
  template <int groups>
  __device__ __forceinline__ void sum_x(uint32_t stage, uint32_t to) const {
    const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};
    const uint32_t row = stage + lane % 8 * 128 + ((lane / 8 ^ lane % 8) << 4);
#pragma unroll
    for (int j = 0; j < kTM; ++j) {
      float sum[groups][4] = {};
#pragma unroll
      for (int pair = 0; pair < 4; ++pair) {
        uint32_t b[4];
        ptx::ldmatrix_x4(b, (row ^ (pair % 2 * 64)) + pair / 2 * kHalfBytes + j * 1024);
        Half<T>::mma(sum[pair * groups / 4], ones, b[0], b[1]);
        Half<T>::mma(sum[pair * groups / 4], ones, b[2], b[3]);
      }
      if (lane < 4) {
#pragma unroll
        for (int group = 0; group < groups; ++group) {
          ptx::store_shared_8(to + (group * Tile::kTokens + j * 8 + lane * 2) * 4,
                              {__float_as_uint(sum[group][0]), __float_as_uint(sum[group][1])});
        }
      }
    }
  }
  template <int groups>
  __device__ __forceinline__ void bring_x() const {
    const int helper = warp - Tile::kWarps;
    if (helper < 0 || helper >= d.helpers) return;
    Place at{0, 0};
    move(at, helper);
    Values v{};
    load_x(helper, v);
#pragma unroll 1
    for (int step = helper; step < steps; step += d.helpers) {
      if (at.round > 0) tma::barrier_wait(empty(at.slot), (at.round - 1) & 1);
      store_x(x_stage(at.slot), v);
      load_x(step + d.helpers, v);
      __syncwarp();
      sum_x<groups>(x_stage(at.slot), x_sums(at.slot));
      ptx::fence_async_proxy();
      tma::barrier_arrive(full(at.slot));  // every lane for what it stored
      move(at, d.helpers);
    }
  }

  // ---- Products.

  struct Cursor {  // this lane's place in the weights
    int step;      // of all K
    const uint8_t *weight, *scales;
  };
  __device__ __forceinline__ int tiles() const { return row_tiles - warp_n; }  // from this warp's first on
  __device__ __forceinline__ Cursor first() const {
    const int step = begin + slice, row_tile = row_tile0 + warp_n;
    return {step, p.weight + row_tile * d.row_tile_bytes + step * kStepBytes + lane * 16,
            ptx::opaque(p.scales + (row_tile + (lane >> d.chunk_shift) * d.warps_n) * d.row_tile_scale_bytes +
                        (lane & ((1 << d.chunk_shift) - 1)) * 16)};
  }
  __device__ __forceinline__ bool copies_scales() const {
    const int tile = lane >> d.chunk_shift;
    return tile < kR && tile * d.warps_n < tiles();
  }
  // Starts copying a K-step of this warp's row tiles and the parameters of the groups it touches.
  __device__ __forceinline__ void fetch(Cursor& at, bool scales, uint32_t stage) const {
    const int offset = (at.step * d.groups_of_step >> d.group_shift) * p.group_bytes;
    if (at.step < begin + steps) {
      if (at.step < d.plain_steps) {
        const uint32_t to = stage + lane * 16;
        const uint8_t* weight = at.weight;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          if (i * d.warps_n < tiles()) {
            ptx::cp_async_16(to + i * kStepBytes, weight);
            ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
          }
          if (i + 1 < kR) weight += d.warp_tile_bytes;
        }
        if (scales) ptx::cp_async_16(to + kR * kStepBytes, at.scales + offset);
      } else {
        fetch_slowly(p, d, at.step, offset, tiles(), at.weight, at.scales, stage);
      }
    }
    ptx::cp_async_commit();
    at.step += d.warps_k;
    at.weight += d.warps_k * kStepBytes;
  }
  // Any step: one that ends past K, or of groups that take more than 32 chunks of parameters. Kept out of the main
  // loop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const BatchParams& d, int step, int offset,
                                                   int tiles, const uint8_t* weight, const uint8_t* scales,
                                                   uint32_t stage) {
    const int lane = threadIdx.x % 32;
    tiles = min((tiles + d.warps_n - 1) / d.warps_n, kR);
    const uint32_t to = stage + lane * 16;
    for (int i = 0; i < tiles; ++i, weight += d.warp_tile_bytes) {
      ptx::cp_async_16(to + i * kStepBytes, weight);
      if (2 * step + 1 < p.k_tiles) ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
    }
    const int byte = (lane & ((1 << d.chunk_shift) - 1)) * 16, at_once = 32 >> d.chunk_shift;
    scales += offset;
    for (int i = lane >> d.chunk_shift; i < tiles;
         i += at_once, scales += at_once * d.warps_n * d.row_tile_scale_bytes) {
      const uint32_t at_shared = stage + kR * kStepBytes + (i << d.chunk_shift) * 16 + byte;
      if (offset + byte < d.row_tile_scale_bytes) {
        ptx::cp_async_16(at_shared, scales);
      } else {
        ptx::store_shared_16(at_shared, {0, 0, 0, 0});
      }
    }
  }
};

}  // namespace qao::int4_mm::batch
