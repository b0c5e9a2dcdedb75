// CTA of the skinny-GEMM kernels, and the weight loader: cp.async copies of packed W, scales and zeros.
//
// A CTA owns a run of n-tiles and computes kTilesN of them per pass. Its warps split K: warp w takes K-steps w,
// w + kWarps, ... of 128 columns through its private cp.async ring, which keeps running across passes. A kernel derives
// its CTA from this one and adds how x reaches a warp (smem_x.cuh, tma_x.cuh, ring_x.cuh).
#pragma once

#include "common/ptx.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny {

constexpr int kPrefetchBytes = 8192;  // of weights per n-tile

// A warp's ring. All is inlined, so what a kernel knows at compile time stays a constant.
struct Stages {
  int count, bytes, scale_offset, chunk_shift;  // scale_offset: of scales and zeros in a stage
  int groups_of_step, group_bytes;
  int64_t next_tile_bytes, next_tile_scale_bytes;  // between the n-tiles of a pass
};

// `Cut` is SmemXParams, TmaXParams or RingXParams.
template <typename Tile_, typename Cut>
struct WeightLoader {
  using Tile = Tile_;
  static constexpr int kR = Tile::kTilesN, kWarps = Tile::kWarps;
  const Params& p;
  const Cut& d;
  // Overridden per expert. Modified kernel parameters would be copied to local memory by each thread.
  const uint8_t *weight, *scales;
  int tokens;
  const int lane, slice;
  int row_tile0, row_tiles;  // of this CTA
  const int begin, steps;    // K-steps of this CTA
  const Stages stages;
  const uint32_t shared, ring;  // shared addresses of the CTA's memory and of the warp's ring

  // `cta` counts the CTAs that divide the n-tiles.
  __device__ __forceinline__ WeightLoader(const Params& params, const Cut& cut, int cta, int first_step, int some_steps,
                                          const Stages& of_ring, uint32_t memory, uint32_t rings)
      : p(params),
        d(cut),
        weight(params.weight),
        scales(params.scales),
        tokens(cut.tokens),
        lane(threadIdx.x % 32),
        slice(ptx::warp_index()),
        row_tile0(cta * d.row_tiles + min(cta, d.more_row_tiles)),
        row_tiles(d.row_tiles + (cta < d.more_row_tiles)),
        begin(first_step),
        steps(some_steps),
        stages(of_ring),
        shared(memory),
        ring(rings + slice * (stages.count * stages.bytes)) {}

  __device__ __forceinline__ uint32_t stage_address(int stage) const { return ring + stage * stages.bytes; }

  // Iterates over the K-steps of this warp, pass after pass, with this lane's global pointers.
  struct Cursor {
    int step;
    int tiles;  // remaining n-tiles of the CTA, of the pass if merged; zero or less past the last pass
    const uint8_t *weight, *scales;
    int pass;  // merged: counted from the first of the grid
  };
  __device__ __forceinline__ int group_bytes_at(int step) const {
    return (step * stages.groups_of_step >> d.group_shift) * stages.group_bytes;
  }
  // Sets this lane's pointers to a K-step of the pass that begins with n-tile `row_tile`.
  __device__ __forceinline__ void point(Cursor& at, const uint8_t* of_weight, const uint8_t* of_scales,
                                        int row_tile) const {
    const int tile = lane >> stages.chunk_shift, chunk = lane & ((1 << stages.chunk_shift) - 1);
    at.weight = of_weight + row_tile * d.row_tile_bytes + at.step * kStepBytes + lane * 16;
    at.scales = of_scales + row_tile * d.row_tile_scale_bytes + tile * stages.next_tile_scale_bytes +
                group_bytes_at(at.step) + chunk * 16;
  }
  __device__ __forceinline__ Cursor first() const {
    Cursor at{begin + slice, row_tiles};
    point(at, weight, scales, row_tile0);
    turn(at);
    return at;
  }
  // Moves a cursor past the last K-step to the next pass.
  __device__ __forceinline__ void turn(Cursor& at) const {
    const int before = at.step;
    while (at.step >= begin + steps) {
      at.step -= steps, at.tiles -= kR;
      at.weight += d.next_pass_bytes, at.scales += d.next_pass_scale_bytes;
    }
    at.weight -= (before - at.step) * kStepBytes;
    at.scales -= group_bytes_at(before) - group_bytes_at(at.step);
  }

  // Issues the copies of a whole K-step: the pass's n-tiles, scales and zeros of the groups it touches.
  __device__ __forceinline__ void fetch_weight(const Cursor& at, uint32_t stage) const {
    const uint32_t to = stage + lane * 16;
    const uint8_t* from = at.weight;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      if (i < at.tiles) {
        ptx::cp_async_16(to + i * kStepBytes, from);
        ptx::cp_async_16(to + i * kStepBytes + kTileBytes, from + kTileBytes);
      }
      if (i + 1 < kR) from += stages.next_tile_bytes;
    }
    const int tile = lane >> stages.chunk_shift;
    if (tile < kR && tile < at.tiles) ptx::cp_async_16(to + stages.scale_offset, at.scales);
    if (Cut::kChunksOfLane == 2 && kR << stages.chunk_shift > 32) {
      const int tiles = 32 >> stages.chunk_shift;
      ptx::cp_async_16_if(tile + tiles < min(at.tiles, kR), to + stages.scale_offset + 512,
                          at.scales + tiles * stages.next_tile_scale_bytes);
    }
  }
  // Copies any K-step, even one that ends past K. Called out of line, to keep it out of the mainloop's code and
  // registers.
  static __device__ __forceinline__ void fetch_weight_slowly(const Params& p, const Cut& d, int step, int tiles_left,
                                                             const uint8_t* weight, const uint8_t* scales,
                                                             uint32_t scale_offset, int64_t next_tile_bytes,
                                                             int64_t next_tile_scale_bytes, uint32_t stage) {
    const int lane = threadIdx.x % 32, tiles = min(tiles_left, kR);
    const uint32_t to = stage + lane * 16;
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile, weight += next_tile_bytes) {
      ptx::cp_async_16(to + tile * kStepBytes, weight);
      if (2 * step + 1 < p.k_tiles) ptx::cp_async_16(to + tile * kStepBytes + kTileBytes, weight + kTileBytes);
    }
    const int offset = (step * d.groups_of_step >> d.group_shift) * p.group_bytes;
    const int byte = (lane & ((1 << d.chunk_shift) - 1)) * 16, rows = 32 >> d.chunk_shift;
    uint32_t to_scales = to + scale_offset;
#pragma unroll 1
    for (int tile = lane >> d.chunk_shift; tile < tiles; tile += rows, to_scales += 512) {
      if (offset + byte < d.row_tile_scale_bytes) {
        ptx::cp_async_16(to_scales, scales);
      } else {
        ptx::store_shared_16(to_scales, {0, 0, 0, 0});
      }
      scales += rows * next_tile_scale_bytes;
    }
  }

  __device__ __forceinline__ void wait_for_x(int) const {}  // of a K-step, in the first pass

  // PDL: the previous kernel may still run and may write anything, even weights. Before the wait, only prefetch weights
  // to L2, where a later write to them is still seen.
  __device__ __forceinline__ void prefetch(const uint8_t* of_weight, const uint8_t* of_scales, int row_tile) const {
    const int bytes = min(min(steps * kStepBytes, (p.k_tiles - 2 * begin) * kTileBytes), kPrefetchBytes);
    ptx::prefetch_l2(of_weight + row_tile * d.row_tile_bytes + begin * kStepBytes, bytes);
    ptx::prefetch_l2(of_scales + row_tile * d.row_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
  }
  __device__ __forceinline__ void prefetch_first_pass() const {
    if (static_cast<int>(threadIdx.x) < min(row_tiles, kR)) prefetch(weight, scales, row_tile0 + threadIdx.x);
  }
};

}  // namespace qao::gemm::sm90_skinny
