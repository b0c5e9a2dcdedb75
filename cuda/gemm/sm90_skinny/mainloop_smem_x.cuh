// Skinny GEMM for at most eight tokens from Hopper on, with all of x resident in shared memory.
//
// A CTA owns a run of n-tiles and computes kTilesN of them per pass. Its warps split K: each takes every kWarps-th
// K-step of 128 columns through its private cp.async ring, which keeps running across passes. x is loaded to shared
// memory once. Partial sums of the warps are added in a fixed order.
//
// With several weights (`merged`), CTAs own runs of passes, and a pass lies in one weight.
#pragma once

#include "common/ptx.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/mma_int4.cuh"
#include "gemm/sm90_skinny/params.h"
#include "gemm/sm90_skinny/prologue_rmsnorm.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm90_skinny::smem {

template <typename Tile, typename T, typename Product, bool merged>
struct Held {
  static constexpr int kR = Tile::kTilesN, kWarps = Tile::kWarps;
  const Params& p;
  const SmemXParams& d;
  const MergedParts* const parts;               // null unless merged
  const int lane, slice, row_tile0, row_tiles;  // of this CTA; passes if merged
  const uint32_t shared, ring;

  __device__ __forceinline__ Held(const Params& params, const SmemXParams& few, const MergedParts* weights,
                                  uint32_t base)
      : p(params),
        d(few),
        parts(weights),
        lane(threadIdx.x % 32),
        slice(ptx::warp_index()),
        row_tile0(blockIdx.x * d.row_tiles + min(static_cast<int>(blockIdx.x), d.more_row_tiles)),
        row_tiles((d.row_tiles + (static_cast<int>(blockIdx.x) < d.more_row_tiles)) << (merged ? 0 : gated())),
        shared(base),
        ring(base + d.ring_offset + ptx::warp_index() * Tile::kStages * d.stage_bytes) {}

  // If gated, the two n-tiles of a pass are gate and up.
  __device__ __forceinline__ int gated() const { return kR == 2 ? d.gated : 0; }
  __device__ __forceinline__ Factors factors() const { return {shared + d.factors_offset}; }

  // The n-tiles of a pass over several weights: `tiles` of them from n-tile `first` of a part on, or n-tile `first` of
  // both gate and up. `pass` counts from the first of the grid.
  struct Place {
    int part, first, tiles;
  };
  __device__ __forceinline__ Place place_of(int pass) const {
    int part = 0;
    while (part + 1 < parts->count && pass >= parts->first_pass[part + 1]) ++part;
    const int first = (pass - parts->first_pass[part]) * (kR >> gated());
    return {part, first, gated() ? 2 : min(kR, parts->part[part].row_tiles - first)};
  }

  // Iterates over the K-steps of this warp, pass after pass, with this lane's global pointers.
  struct Cursor {
    int step;
    int tiles;  // remaining n-tiles of the CTA, of the pass if merged; zero or less past the last pass
    const uint8_t *weight, *scales;
    int pass;  // merged: counted from the first of the grid
  };
  __device__ __forceinline__ int group_bytes_at(int step) const {
    return (step * d.groups_of_step >> d.group_shift) * p.group_bytes;
  }
  // Sets a cursor's pointers to its K-step of its pass.
  __device__ __forceinline__ void enter(Cursor& at) const {
    at.tiles = 0;
    if (at.pass >= row_tile0 + row_tiles) return;
    const Place place = place_of(at.pass);
    const MergedParts::Part& part = parts->part[place.part];
    const int chunk = lane & ((1 << d.chunk_shift) - 1);
    at.tiles = place.tiles;
    at.weight = part.weight + place.first * d.row_tile_bytes + at.step * kStepBytes + lane * 16;
    at.scales = part.scales + place.first * d.row_tile_scale_bytes + (lane >> d.chunk_shift) * d.next_tile_scale_bytes +
                group_bytes_at(at.step) + chunk * 16;
  }
  // Moves a cursor past the last K-step to the next pass.
  __device__ __forceinline__ void turn(Cursor& at) const {
    if constexpr (merged) {
      while (at.step >= d.steps) at.step -= d.steps, ++at.pass;
      return enter(at);
    }
    const int before = at.step;
    while (at.step >= d.steps) {
      at.step -= d.steps, at.tiles -= kR;
      at.weight += d.next_pass_bytes, at.scales += d.next_pass_scale_bytes;
    }
    at.weight -= (before - at.step) * kStepBytes;
    at.scales -= group_bytes_at(before) - group_bytes_at(at.step);
  }
  __device__ __forceinline__ Cursor first() const {
    if constexpr (merged) {
      Cursor at{slice, 0, nullptr, nullptr, row_tile0};
      turn(at);
      return at;
    }
    const int chunk = lane & ((1 << d.chunk_shift) - 1);
    Cursor at{slice, row_tiles, p.weight + row_tile0 * d.row_tile_bytes + slice * kStepBytes + lane * 16,
              p.scales + row_tile0 * d.row_tile_scale_bytes + (lane >> d.chunk_shift) * d.next_tile_scale_bytes +
                  group_bytes_at(slice) + chunk * 16,
              0};
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
  static __device__ __noinline__ void fetch_slowly(const Params& p, const SmemXParams& d, int step, int tiles,
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
    const int all = slots * d.tokens * kQuads;
    for (int first = threadIdx.x / 32 * 32; first < all; first += Tile::kThreads) {  // uniform across the warp
      const int i = first + lane, quad = i % kQuads, tile = quad / 4;
      int slot = 0, token = i / kQuads;
      while (i < all && token >= d.tokens) token -= d.tokens, ++slot;
      const Rows rows = rows_of(pass + slot, tile);
      const bool exists = i < all && rows.exist;
      const int n = rows.first + quad % 4 * 4;
      float value[4] = {};
      if (exists) {
        add_slices<kWarps>(partial(slot, 0, token) + quad * 16, d.tokens * (Tile::kPaddedRow * 4), value);
        if (d.normed) multiply(value, factors().of(token));
      }
      if constexpr (merged) {
        repair_part(rows.part, n, token, value);
      } else {
        repair<FewX<T>>(p, d, n, token, value);
      }
      if constexpr (Product::kFp4) {
        if (exists) divide_rows(p, p.scales, n, value);
      }
      if constexpr (merged) {
        const MergedParts::Part& part = parts->part[rows.part];
        if (exists) add_bias(part.bias, p.bias_dtype, part.n, n, value);
      } else {
        if (exists) add_bias(p, p.bias, n, value);
      }
      if (gated()) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float up = __shfl_down_sync(kAllLanes, value[e], 4);
          value[e] = __fdividef(value[e], 1 + __expf(-value[e])) * up;
        }
      }
      if (!exists || (tile != 0 && gated())) continue;
      if constexpr (merged) {
        store_rows<T>(parts->part[rows.part].y, parts->part[rows.part].n, n, token, value);
      } else {
        store_rows<T>(p.y, p.n >> gated(), n, token, value);
      }
    }
  }
  // Rows of W of an n-tile of a pass, counted from the CTA's first.
  struct Rows {
    int part, first;
    bool exist;
  };
  __device__ __forceinline__ Rows rows_of(int pass, int tile) const {
    if constexpr (merged) {
      if (pass >= row_tiles) return {0, 0, false};
      const Place place = place_of(row_tile0 + pass);
      if (gated()) return {tile, place.first * kTileN, true};
      return {place.part, (place.first + tile) * kTileN, tile < place.tiles};
    } else {
      const int row_tile = pass * kR + tile;
      const int n = (row_tile0 + (row_tile >> gated())) * kTileN + (gated() ? tile * (p.n >> gated()) : 0);
      return {0, n, row_tile < row_tiles};
    }
  }
  // The same as repair() for lanes with rows of different weights.
  __device__ __forceinline__ void repair_part(int part, int n, int token, float (&value)[4]) const {
    uint32_t wrong = __ballot_sync(kAllLanes, !isfinite(value[0] + value[1] + value[2] + value[3]));
    for (; wrong != 0; wrong &= wrong - 1) {
      const int from = __ffs(wrong) - 1;
      const MergedParts::Part& of = parts->part[__shfl_sync(kAllLanes, part, from)];
      const float4 again = exact<FewX<T>>(p, d, of.weight, of.scales, __shfl_sync(kAllLanes, n, from),
                                          __shfl_sync(kAllLanes, token, from));
      if (lane == from) value[0] = again.x, value[1] = again.y, value[2] = again.z, value[3] = again.w;
    }
  }
  static __device__ __forceinline__ void multiply(float (&value)[4], float factor) {
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] *= factor;
  }
};

// The kernel's body. T is the dtype of x, Product the MMA policy of W's format.
template <typename Tile, typename T, typename Product, bool merged>
__device__ __forceinline__ void run(const Params& p, const SmemXParams& d, const MergedParts* parts) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = Held<Tile, T, Product, merged>;
  const Cta cta(p, d, parts, ptx::shared_address(shared));

  // PDL: the previous kernel may still run and may write anything, even weights. Before the wait, only prefetch weights
  // to L2, where a later write to them is still seen.
  if (static_cast<int>(threadIdx.x) < min(merged ? cta.row_tiles * Tile::kTilesN : cta.row_tiles, 2 * Tile::kTilesN)) {
    const uint8_t *weight = p.weight, *scales = p.scales;
    int tile = cta.row_tile0 + (threadIdx.x >> cta.gated()), second = threadIdx.x & cta.gated();
    bool exists = true;
    if constexpr (merged) {
      const auto place = cta.place_of(cta.row_tile0 + threadIdx.x / Tile::kTilesN);
      const int of_pass = threadIdx.x % Tile::kTilesN;
      weight = parts->part[place.part].weight, scales = parts->part[place.part].scales;
      tile = place.first + (of_pass >> cta.gated()), second = of_pass & cta.gated();
      exists = of_pass < place.tiles;
    }
    if (exists) {
      weight += tile * d.row_tile_bytes, scales += tile * d.row_tile_scale_bytes;
      ptx::prefetch_l2(weight + second * d.next_tile_bytes, min(p.k_tiles * kTileBytes, kPrefetchBytes));
      ptx::prefetch_l2(scales + second * d.next_tile_scale_bytes, static_cast<int>(d.row_tile_scale_bytes));
    }
  }
  if (d.normed && p.norm.weight != nullptr && threadIdx.x == 32 && blockIdx.x < 4) {
    ptx::prefetch_l2(p.norm.weight, p.k * 2);
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

template <typename Tile, typename T, typename Product>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm90_skinny_smem_x(const __grid_constant__ Params p, const __grid_constant__ SmemXParams d) {
  run<Tile, T, Product, false>(p, d, nullptr);
}

template <typename Tile, typename T, typename Product>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm90_skinny_smem_x_merged(const __grid_constant__ Params p, const __grid_constant__ SmemXParams d,
                              const __grid_constant__ MergedParts parts) {
  run<Tile, T, Product, true>(p, d, &parts);
}

}  // namespace qao::gemm::sm90_skinny::smem
