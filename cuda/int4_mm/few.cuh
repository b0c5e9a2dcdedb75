// The body for at most eight tokens on Hopper whose x fits into shared memory: decode.cuh's arithmetic (which see) with
// more warps, fewer registers and fewer instructions.
//
// A CTA owns a run of row tiles and walks it in passes of kTilesN. Its warps are slices of K: each takes every so many
// K-steps of 128 columns through a cp.async ring of its own, which runs on from pass to pass. x is brought to shared
// memory once, already scaled. Sums of the slices are added in their order.
//
// The columns of a product are tokens, or pairs of a token and one of the several groups of a K-step: x is zero in the
// columns of other groups. So a column has one scale, and small groups cost no more instructions than large ones.
#pragma once

#include <cuda_bf16.h>

#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "int4_mm/decode_common.cuh"
#include "int4_mm/few_x.cuh"
#include "int4_mm/kernels.h"
#include "int4_mm/layout.h"
#include "int4_mm/tile.h"

namespace qao::int4_mm::few {

using T = __nv_bfloat16;

template <typename Tile>
struct Few {
  static constexpr int kR = Tile::kTilesN, kWarps = Tile::kWarps;
  const Params& p;
  const FewParams& d;
  const int lane, slice, row_tile0, row_tiles;
  const uint32_t shared, ring;

  static __device__ __forceinline__ int warp() { return __shfl_sync(kAllLanes, static_cast<int>(threadIdx.x / 32), 0); }
  __device__ __forceinline__ Few(const Params& params, const FewParams& few, uint32_t base)
      : p(params),
        d(few),
        lane(threadIdx.x % 32),
        slice(warp()),
        row_tile0(blockIdx.x * d.row_tiles + min(static_cast<int>(blockIdx.x), d.more_row_tiles)),
        row_tiles((d.row_tiles + (static_cast<int>(blockIdx.x) < d.more_row_tiles)) << gated()),
        shared(base),
        ring(base + d.ring_offset + warp() * Tile::kStages * d.stage_bytes) {}

  // Gate and up are the two row tiles of a pass.
  __device__ __forceinline__ int gated() const { return kR == 2 ? d.gated : 0; }
  __device__ __forceinline__ Factors factors() const { return {shared + d.factors_offset}; }

  // Walks this warp's K-steps, pass after pass, with this lane's pointers.
  struct Cursor {
    int step;
    int tiles;  // row tiles that the CTA has left; none past the last pass
    const uint8_t *weight, *scales;
  };
  __device__ __forceinline__ void seek(Cursor& at) const {
    while (at.step >= d.steps) at.step -= d.steps, at.tiles -= kR;
    const int row_tile = row_tile0 + ((row_tiles - at.tiles) >> gated());
    at.weight = p.weight + row_tile * d.row_tile_bytes + at.step * kStepBytes + lane * 16;
    at.scales = p.scales + row_tile * d.row_tile_scale_bytes + (lane >> d.chunk_shift) * d.next_tile_scale_bytes +
                (at.step * d.groups_of_step >> d.group_shift) * p.group_bytes +
                (lane & ((1 << d.chunk_shift) - 1)) * 16;
  }
  __device__ __forceinline__ Cursor first() const {
    Cursor at{slice, row_tiles};
    seek(at);
    return at;
  }
  __device__ __forceinline__ void advance(Cursor& at) const {
    at.step += kWarps;
    at.weight += kWarps * kStepBytes;
    at.scales += d.scale_advance;
    if (at.step >= d.steps) seek(at);
  }

  // Starts copying a K-step of the pass's row tiles and the parameters of the groups it touches.
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
  // A step that ends past K. Kept out of the main loop's code and registers.
  static __device__ __noinline__ void fetch_slowly(const Params& p, const FewParams& d, int step, int tiles,
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

  // Of the K-step's groups, the one that a column belongs to; and its token.
  __device__ __forceinline__ int column_group(int column) const { return column >> d.token_shift; }
  __device__ __forceinline__ int column_token(int column) const { return column & ((1 << d.token_shift) - 1); }

  using Sums = float[kR][4];

  // What a lane needs to know of its columns and rows: where ldmatrix finds x, or zeros for the columns of another
  // group; where its parameters are in a stage, and which bytes of a word.
  struct Places {
    uint32_t x, zeros, parameters, select, group;
    bool half;
  };
  __device__ __forceinline__ Places places() const {
    const uint32_t g = lane / 4, size = size_of(p.scale_dtype);
    const bool half = p.scale_dtype == DType::kFloat16;
    const uint32_t odd = half ? 0x4432 : 0x3244, even = half ? 0x4410 : 0x1044;
    return {ptx::opaque(shared + min(column_token(lane % 8), d.tokens - 1) * kTokenBytes + lane / 8 * 16),
            ptx::opaque(shared + d.ring_offset - kZeroBytes),
            ptx::opaque(kR * kStepBytes + column_group(lane % 4 * 2) * p.group_bytes + (g * size & ~3u)),
            ptx::opaque(size == 4 ? 0x3210
                        : g % 2   ? odd
                                  : even),
            ptx::opaque(static_cast<uint32_t>(column_group(lane % 8))),
            half};
  }

  // Row tiles and tokens that do not exist are multiplied like others: their sums go nowhere.
  template <bool grouped>
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t step_x, const Places& at, Sums& sum) const {
    const uint32_t size = size_of(p.scale_dtype);
    const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};
    float x_sum[4] = {};
    float product[kR][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[4];
      ptx::ldmatrix_x4(b, !grouped || pair >> d.pair_shift == at.group ? at.x + step_x + pair * 64 : at.zeros);
      Half<T>::mma(x_sum, ones, b[0], b[1]);
      Half<T>::mma(x_sum, ones, b[2], b[3]);
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        const uint2 two = ptx::load_shared_8(stage + lane * 16 + i * kStepBytes + pair / 2 * kTileBytes + pair % 2 * 8);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          const uint32_t word = s == 0 ? two.x : two.y, odd = __byte_perm(word, 0, 0x4341);
          const uint32_t a[4] = {word & 0x000F000F, word & 0x00FF00FF, odd & 0x000F000F, odd};
          Half<T>::mma(product[i], a, b[2 * s], b[2 * s + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      float parameter[4];  // scales of rows g and g + 8, zero points of rows g and g + 8
#pragma unroll
      for (int which = 0; which < 4; ++which) {
        if (which >= 2 && !d.zeros) {
          parameter[which] = kSymmetricZero;
          continue;
        }
        const uint32_t from = stage + at.parameters + i * (16 << d.chunk_shift) + which * 8 * size;
        parameter[which] = __uint_as_float(__byte_perm(ptx::load_shared_word(from), 0, at.select));
        ptx::half_to_float_if(at.half, parameter[which]);
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = product[i][e], both = product[i][e + 2], xs = x_sum[e];
        sum[i][e] += parameter[0] * (low - parameter[2] * xs);
        sum[i][e + 2] += parameter[1] * (both - low - 16 * parameter[3] * xs);
      }
    }
  }

  // All K-steps of this warp, then the sums.
  template <bool grouped>
  __device__ __forceinline__ void walk(Cursor& ahead) const {
    const Places at = places();
    const uint32_t stage_bytes = d.stage_bytes, end = ring + Tile::kStages * stage_bytes;
    uint32_t stage = ring, stage_ahead = end - stage_bytes;
    const uint32_t step_bytes = d.tokens * kTokenBytes;
    int step = slice, slot = 0;
    for (int pass = 0; pass < d.passes; ++pass) {
      Sums sum = {};
      for (; step < d.steps; step += kWarps) {
        ptx::cp_async_wait<Tile::kStages - 2>();
        __syncwarp();
        fetch(ahead, stage_ahead);
        advance(ahead);
        multiply<grouped>(stage, step * step_bytes, at, sum);
        stage_ahead = stage;
        stage += stage_bytes;
        if (stage == end) stage = ring;
      }
      step -= d.steps;
      keep<grouped>(slot, sum);
      if (++slot == d.slots || pass + 1 == d.passes) {
        __syncthreads();
        write(pass + 1 - slot, slot);
        if (pass + 1 < d.passes) __syncthreads();
        slot = 0;
      }
    }
  }

  // Sums in shared memory: [slot][slice][token][kPaddedRow] float32, a slot the row tiles of a pass.
  __device__ __forceinline__ uint32_t partial(int slot, int of_slice, int token) const {
    return shared + d.partials_offset + ((slot * kWarps + of_slice) * d.tokens + token) * (Tile::kPaddedRow * 4);
  }
  template <bool grouped>
  __device__ __forceinline__ void keep(int slot, Sums& sum) const {
    const int t = lane % 4, token = column_token(t * 2);
    if constexpr (!grouped) {
      const uint32_t to = partial(slot, slice, token) + lane / 4 * 4;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (token + e >= d.tokens) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          const uint32_t at = to + (e * Tile::kPaddedRow + i * kTileN) * 4;
          ptx::store_shared_float(at, sum[i][e] * kUnit);
          ptx::store_shared_float(at + 32, sum[i][e + 2] * (kUnit / 16));
        }
      }
    } else {
      // Adds the groups, which neighbouring lanes have: two keep rows g and two g + 8, and of four groups, one token
      // each.
      const float unit = t < 2 ? kUnit : kUnit / 16;
      const bool four = d.pair_shift == 0;
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) value[e] = exchange(t < 2, sum[i][e], sum[i][e + 2], 2) * unit;
        if (four) value[0] = exchange(t % 2 == 0, value[0], value[1], 1);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int of_token = four ? t % 2 : token + e;
          if (of_token >= d.tokens || (four && e == 1)) continue;
          ptx::store_shared_float(partial(slot, slice, of_token) + (i * kTileN + t / 2 * 8 + lane / 4) * 4, value[e]);
        }
      }
    }
  }
  // This lane keeps one of two values and gives the other to the lane `distance` away, which keeps that.
  static __device__ __forceinline__ float exchange(bool first, float a, float b, int distance) {
    return (first ? a : b) + __shfl_xor_sync(kAllLanes, first ? b : a, distance);
  }

  // Adds the slices of the `slots` passes from `pass` on, and stores y, a thread four rows of a token. If gated, a pass
  // has a row tile of gate and one of up, and y is SiLU(gate) * up: four lanes have what four others need.
  __device__ __forceinline__ void write(int pass, int slots) const {
    constexpr int kQuads = kR * kTileN / 4;
    const int all = slots * d.tokens * kQuads, outputs = p.n >> gated();
    for (int first = threadIdx.x / 32 * 32; first < all; first += Tile::kThreads) {  // alike for all lanes of a warp
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
      repair<FewX>(p, d, n, token, value);
      if (exists) add_bias(p, n, value);
      if (gated()) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float up = __shfl_down_sync(kAllLanes, value[e], 4);
          value[e] = __fdividef(value[e], 1 + __expf(-value[e])) * up;
        }
      }
      if (exists && (tile == 0 || !gated())) store_rows(p, outputs, n, token, value);
    }
  }
  static __device__ __forceinline__ void multiply(float (&value)[4], float factor) {
#pragma unroll
    for (int e = 0; e < 4; ++e) value[e] *= factor;
  }
};

template <typename Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    few_kernel(const __grid_constant__ Params p, const __grid_constant__ FewParams d) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = Few<Tile>;
  const Cta cta(p, d, ptx::shared_address(shared));

  // The kernel before this one may still run. What it writes must not be read before the wait, and might be anything,
  // weights too: they are brought as far as the L2 cache, where a later write to them still counts.
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
    fetch_next();  // one stage only before x, which all wait for
    while (true) {
      x.store();
      unit += x.kAtOnce;
      if ((unit & ~1) >= d.steps * d.tokens) break;  // alike for both units of a warp
      x.seek(unit);
      x.load();
    }
  };
  if (d.normed) {
    bring(NormedX<Tile::kThreads>(p, d, cta.shared));
  } else {
    bring(PlainX<Tile::kThreads>(p, d, cta.shared));
  }
#pragma unroll 1
  for (int i = 0; i < Tile::kStages - 2; ++i) fetch_next();
  if (threadIdx.x == 0) ptx::store_shared_16(cta.shared + d.ring_offset - kZeroBytes, {0, 0, 0, 0});
  __syncthreads();
  if (d.normed) {  // the factors are not needed before write()
    if (cta.slice < d.tokens) cta.factors().make(p, d.steps, cta.slice);
  }
  if (d.groups_of_step == 1) {
    cta.template walk<false>(ahead);
  } else {
    cta.template walk<true>(ahead);
  }
}

}  // namespace qao::int4_mm::few
