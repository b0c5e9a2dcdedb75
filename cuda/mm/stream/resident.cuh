// Skinny GEMM for at most eight tokens from Hopper on, with all of x resident in shared memory.
//
// A CTA owns a run of n-tiles and computes kTilesN of them per pass. Its warps split K: each takes every kWarps-th
// K-step of 128 columns through its private cp.async ring, which keeps running across passes. x is loaded to shared
// memory once. Partial sums of the warps are added in a fixed order.
#pragma once

#include "common/ptx.cuh"
#include "int4/layout.h"
#include "mm/stream/common.cuh"
#include "mm/stream/kernels.h"
#include "mm/stream/resident_product.cuh"
#include "mm/stream/resident_x.cuh"
#include "mm/stream/tile.h"

namespace qao::mm::stream::held {

template <typename Tile, typename T, typename Product>
struct Held {
  static constexpr int kR = Tile::kTilesN, kWarps = Tile::kWarps;
  const Params& p;
  const ResidentParams& d;
  const int lane, slice, row_tile0, row_tiles;
  const uint32_t shared, ring;

  __device__ __forceinline__ Held(const Params& params, const ResidentParams& few, uint32_t base)
      : p(params),
        d(few),
        lane(threadIdx.x % 32),
        slice(ptx::warp_index()),
        row_tile0(blockIdx.x * d.row_tiles + min(static_cast<int>(blockIdx.x), d.more_row_tiles)),
        row_tiles((d.row_tiles + (static_cast<int>(blockIdx.x) < d.more_row_tiles)) << gated()),
        shared(base),
        ring(base + d.ring_offset + ptx::warp_index() * Tile::kStages * d.stage_bytes) {}

  // If gated, the two n-tiles of a pass are gate and up.
  __device__ __forceinline__ int gated() const { return kR == 2 ? d.gated : 0; }
  __device__ __forceinline__ Factors factors() const { return {shared + d.factors_offset}; }

  // Iterates over the K-steps of this warp, pass after pass, with this lane's global pointers.
  struct Cursor {
    int step;
    int tiles;  // remaining n-tiles of the CTA; zero or less past the last pass
    const uint8_t *weight, *scales;
  };
  __device__ __forceinline__ int group_bytes_at(int step) const {
    return (step * d.groups_of_step >> d.group_shift) * p.group_bytes;
  }
  // Moves a cursor past the last K-step to the next pass.
  __device__ __forceinline__ void turn(Cursor& at) const {
    const int before = at.step;
    while (at.step >= d.steps) {
      at.step -= d.steps, at.tiles -= kR;
      at.weight += d.next_pass_bytes, at.scales += d.next_pass_scale_bytes;
    }
    at.weight -= (before - at.step) * kStepBytes;
    at.scales -= group_bytes_at(before) - group_bytes_at(at.step);
  }
  __device__ __forceinline__ Cursor first() const {
    const int chunk = lane & ((1 << d.chunk_shift) - 1);
    Cursor at{slice, row_tiles, p.weight + row_tile0 * d.row_tile_bytes + slice * kStepBytes + lane * 16,
              p.scales + row_tile0 * d.row_tile_scale_bytes + (lane >> d.chunk_shift) * d.next_tile_scale_bytes +
                  group_bytes_at(slice) + chunk * 16};
    turn(at);
    return at;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.step += kWarps;
    at.weight += kWarps * kStepBytes;
    at.scales += d.scale_advance;
    if (at.step >= d.steps) turn(at);
  }

  // Issues the copies of a K-step: the pass's n-tiles, and scales and zeros of the groups it touches.
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (at.tiles > 0) {
      if (at.step < d.plain_steps) {
        const uint32_t to = stage + lane * 16;
        const uint8_t* weight = at.weight;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          if (i == 0 || i < at.tiles) {
            ptx::cp_async_16(to + i * kStepBytes, weight);
            ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
          }
          if (i + 1 < kR) weight += d.next_tile_bytes;
        }
        const int tile = lane >> d.chunk_shift;
        if (tile < kR && tile < at.tiles) ptx::cp_async_16(to + kR * kStepBytes, at.scales);
      } else {
        fetch_slowly(p, d, at.step, at.tiles, at.weight, at.scales, stage);
      }
    }
    ptx::cp_async_commit();
  }
  // Copies a K-step that ends past K. Kept out of the mainloop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const ResidentParams& d, int step, int tiles,
                                                   const uint8_t* weight, const uint8_t* scales, uint32_t stage) {
    const int lane = threadIdx.x % 32;
    tiles = min(tiles, kR);
    const uint32_t to = stage + lane * 16;
    for (int i = 0; i < tiles; ++i, weight += d.next_tile_bytes) {
      ptx::cp_async_16(to + i * kStepBytes, weight);
      if (2 * step + 1 < p.k_tiles) ptx::cp_async_16(to + i * kStepBytes + kTileBytes, weight + kTileBytes);
    }
    if (lane >> d.chunk_shift >= tiles) return;
    const int byte = (lane & ((1 << d.chunk_shift) - 1)) * 16;
    if ((step * d.groups_of_step >> d.group_shift) * p.group_bytes + byte < d.row_tile_scale_bytes) {
      ptx::cp_async_16(to + kR * kStepBytes, scales);
    } else {
      ptx::store_shared_16(to + kR * kStepBytes, {0, 0, 0, 0});
    }
  }

  // Mainloop over all K-steps of this warp, and epilogue of each pass.
  __device__ __forceinline__ void walk(Cursor& ahead) const {
    const Product product(d, shared);
    const uint32_t stage_bytes = d.stage_bytes, end = ring + Tile::kStages * stage_bytes;
    const uint32_t step_bytes = d.tokens * kTokenBytes;
    uint32_t stage = ring, stage_ahead = end - stage_bytes;
    int step = slice, slot = 0;
    for (int pass = 0; pass < d.passes; ++pass) {
      typename Product::Sums sum = {};
      for (; step < d.steps; step += kWarps) {
        // Wait for the stage
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncwarp();
        // Refill the previous stage
        fetch(ahead, stage_ahead);
        advance(ahead);
        // Convert W and issue the MMAs
        product.multiply(stage, step * step_bytes, sum);
        stage_ahead = stage;
        stage += stage_bytes;
        if (stage == end) stage = ring;
      }
      step -= d.steps;
      // Store the partial sums, and finish passes when all slots are full
      product.give(sum, [&](int token, int row, float value) {
        ptx::store_shared_float(partial(slot, slice, token) + row * 4, value);
      });
      if (++slot == d.slots || pass + 1 == d.passes) {
        __syncthreads();
        write(pass + 1 - slot, slot);
        if (pass + 1 < d.passes) __syncthreads();
        slot = 0;
      }
    }
  }

  // Partial sums in shared memory: [slot][warp][token][kPaddedRow] float32. A slot holds the n-tiles of one pass.
  __device__ __forceinline__ uint32_t partial(int slot, int of_slice, int token) const {
    return shared + d.partials_offset + ((slot * kWarps + of_slice) * d.tokens + token) * (Tile::kPaddedRow * 4);
  }

  // Epilogue of the `slots` passes from `pass` on: adds the partial sums and stores y, four rows of a token per thread.
  // If gated, a pass has one n-tile of gate and one of up, and y is SiLU(gate) * up: four lanes hold the values that
  // four others need.
  __device__ __forceinline__ void write(int pass, int slots) const {
    constexpr int kQuads = kR * kTileN / 4;
    const int all = slots * d.tokens * kQuads, outputs = p.n >> gated();
    for (int first = threadIdx.x / 32 * 32; first < all; first += Tile::kThreads) {  // uniform across the warp
      const int i = first + lane, quad = i % kQuads, tile = quad / 4;
      int slot = 0, token = i / kQuads;
      while (i < all && token >= d.tokens) token -= d.tokens, ++slot;
      const int row_tile = (pass + slot) * kR + tile;
      const bool exists = i < all && row_tile < row_tiles;
      const int n = (row_tile0 + (row_tile >> gated())) * kTileN + quad % 4 * 4 + (gated() ? tile * outputs : 0);
      float value[4] = {};
      if (exists) {
        add_slices<kWarps>(partial(slot, 0, token) + quad * 16, d.tokens * (Tile::kPaddedRow * 4), value);
        if (d.normed) multiply(value, factors().of(token));
      }
      repair<FewX<T>>(p, d, n, token, value);
      if constexpr (Product::kFp4) {
        if (exists) divide_rows(p, p.scales, n, value);
      }
      if (exists) add_bias(p, p.bias, n, value);
      if (gated()) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float up = __shfl_down_sync(kAllLanes, value[e], 4);
          value[e] = __fdividef(value[e], 1 + __expf(-value[e])) * up;
        }
      }
      if (exists && (tile == 0 || !gated())) store_rows<T>(p, outputs, n, token, value);
    }
  }
  static __device__ __forceinline__ void multiply(float (&value)[4], float factor) {
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] *= factor;
  }
};

// T is the dtype of x, Product the MMA policy of W's format.
template <typename Tile, typename T, typename Product>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    resident_kernel(const __grid_constant__ Params p, const __grid_constant__ ResidentParams d) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = Held<Tile, T, Product>;
  const Cta cta(p, d, ptx::shared_address(shared));

  // PDL: the previous kernel may still run and may write anything, even weights. Before the wait, only prefetch weights
  // to L2, where a later write to them is still seen.
  if (threadIdx.x < min(cta.row_tiles, 2 * Tile::kTilesN)) {
    const int tile = cta.row_tile0 + (threadIdx.x >> cta.gated()), second = threadIdx.x & cta.gated();
    const uint8_t* weight = p.weight + tile * d.row_tile_bytes;
    const uint8_t* scales = p.scales + tile * d.row_tile_scale_bytes;
    ptx::prefetch_l2(weight + second * d.next_tile_bytes, min(p.k_tiles * kTileBytes, kPrefetchBytes));
    ptx::prefetch_l2(scales + second * d.next_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
  }
  if (d.normed && p.norm_weight != nullptr && threadIdx.x == 32 && blockIdx.x < 4) {
    ptx::prefetch_l2(p.norm_weight, p.k * 2);
  }
  auto ahead = cta.first();
  uint32_t stage = cta.ring;
  const auto fetch_next = [&] {
    cta.fetch(ahead, stage);
    cta.advance(ahead);
    stage += d.stage_bytes;
  };
  const auto bring = [&](auto x) {
    int unit = threadIdx.x / 16;
    x.seek(unit);
    ptx::wait_for_previous_kernel();
    ptx::launch_dependents();
    x.load();
    fetch_next();  // only one stage before x, on which all threads wait
    while (true) {
      x.store();
      unit += x.kAtOnce;
      if ((unit & ~1) >= d.steps * d.tokens) break;  // uniform for both units of a warp
      x.seek(unit);
      x.load();
    }
  };
  constexpr bool kNorms = std::is_same_v<T, __nv_bfloat16> && !Product::kFp4;
  if (kNorms && d.normed) {
    if constexpr (kNorms) bring(NormedX<Tile::kThreads>(p, d, cta.shared));
  } else {
    bring(PlainX<T, Tile::kThreads>(p, d, cta.shared));
  }
#pragma unroll 1
  for (int i = 0; i < Tile::kStages - 2; ++i) fetch_next();
  if (threadIdx.x == 0) ptx::store_shared_16(cta.shared + d.zeros_offset, {0, 0, 0, 0});
  __syncthreads();
  if (d.normed) {  // write() is the first to need the factors
    if (cta.slice < d.tokens) cta.factors().make(p, d.steps, cta.slice);
  }
  cta.walk(ahead);
}

}  // namespace qao::mm::stream::held
