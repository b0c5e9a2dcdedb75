// Skinny GEMM for at most eight tokens from Hopper on, with all of x resident in shared memory, loaded once
// (prologue_rmsnorm.cuh).
//
// With several weights (`merged`), CTAs own runs of passes, and a pass lies in one weight.
#pragma once

#include "gemm/sm90_skinny/mainloop.cuh"
#include "gemm/sm90_skinny/mma_smem_x.cuh"
#include "gemm/sm90_skinny/prologue_rmsnorm.cuh"

namespace qao::gemm::sm90_skinny::smem {

template <typename Mma, bool merged>
struct Cta : SlotCta<typename Mma::Tile, SmemXParams> {
  using Tile = typename Mma::Tile;
  using T = typename Mma::T;
  using Base = SlotCta<Tile, SmemXParams>;
  using Base::d, Base::kR, Base::lane, Base::p, Base::row_tile0, Base::row_tiles, Base::shared, Base::slice;
  using Base::stages;
  using typename Base::Cursor;
  const MergedParts* const parts;  // null unless merged, where row_tile0 and row_tiles count passes

  __device__ __forceinline__ Cta(const Params& params, const SmemXParams& cut, const MergedParts* weights,
                                 uint32_t memory)
      : Base(memory + cut.partials_offset, 1, params, cut, blockIdx.x, 0, cut.steps,
             Stages{Tile::kStages, cut.stage_bytes, kR * kStepBytes, cut.chunk_shift, cut.groups_of_step,
                    params.group_bytes, cut.next_tile_bytes, cut.next_tile_scale_bytes},
             memory, memory + cut.ring_offset),
        parts(weights) {
    if (!merged) row_tiles <<= gated();
  }

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

  __device__ __forceinline__ Cursor first() const {
    if constexpr (merged) {
      Cursor at{slice, 0, nullptr, nullptr, row_tile0};
      turn(at);
      return at;
    } else {
      return Base::first();
    }
  }
  __device__ __forceinline__ void turn(Cursor& at) const {
    if constexpr (merged) {
      while (at.step >= d.steps) at.step -= d.steps, ++at.pass;
      at.tiles = 0;
      if (at.pass >= row_tile0 + row_tiles) return;
      const Place place = place_of(at.pass);
      at.tiles = place.tiles;
      this->point(at, parts->part[place.part].weight, parts->part[place.part].scales, place.first);
    } else {
      Base::turn(at);
    }
  }
  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (at.tiles <= 0) return;
    if (at.step < d.plain_steps) return this->fetch_weight(at, stage);
    fetch_slowly(p, d, at.step, at.tiles, at.weight, at.scales, stage);
  }
  static __device__ __noinline__ void fetch_slowly(const Params& p, const SmemXParams& d, int step, int tiles,
                                                   const uint8_t* weight, const uint8_t* scales, uint32_t stage) {
    Base::fetch_weight_slowly(p, d, step, tiles, weight, scales, kR * kStepBytes, d.next_tile_bytes,
                              d.next_tile_scale_bytes, stage);
  }

  // Weights of the first two passes.
  __device__ __forceinline__ void prefetch_passes() const {
    if (static_cast<int>(threadIdx.x) >= min(merged ? row_tiles * kR : row_tiles, 2 * kR)) return;
    const uint8_t *weight = p.weight, *scales = p.scales;
    int tile = row_tile0 + (threadIdx.x >> gated()), second = threadIdx.x & gated();
    if constexpr (merged) {
      const Place place = place_of(row_tile0 + threadIdx.x / kR);
      const int of_pass = threadIdx.x % kR;
      weight = parts->part[place.part].weight, scales = parts->part[place.part].scales;
      tile = place.first + (of_pass >> gated()), second = of_pass & gated();
      if (of_pass >= place.tiles) return;
    }
    this->prefetch(weight + second * d.next_tile_bytes, scales + second * d.next_tile_scale_bytes, tile);
  }

  // If gated, a pass has one n-tile of gate and one of up, and y is SiLU(gate) * up: four lanes hold the values that
  // four others need.
  struct Rows : Quad {
    int part;
  };
  __device__ __forceinline__ Rows quad(int pass, int i, int all) const {
    Rows at{Base::quad(pass, i, all), 0};
    const int tile = at.place / 4, of_tile = at.place % 4 * 4;
    if constexpr (merged) {
      at.exists = i < all && pass + at.slot < row_tiles;
      if (!at.exists) return at;
      const Place place = place_of(row_tile0 + pass + at.slot);
      at.part = gated() ? tile : place.part;
      at.n = (gated() ? place.first : place.first + tile) * kTileN + of_tile;
      at.exists = gated() || tile < place.tiles;
    } else if (gated()) {
      const int row_tile = (pass + at.slot) * kR + tile;
      at.n = (row_tile0 + (row_tile >> 1)) * kTileN + tile * (p.n >> 1) + of_tile;
    }
    return at;
  }
  // Epilogue of a quad.
  __device__ __forceinline__ void finish(const Rows& at, float (&value)[4]) const {
    if (at.exists && d.normed) {
      const float factor = factors().of(at.token);
#pragma unroll
      for (int e = 0; e < 4; ++e) value[e] *= factor;
    }
    if constexpr (merged) {
      const MergedParts::Part& part = parts->part[at.part];
      repair<FewX<T>>(p, d, part.weight, part.scales, at.n, at.token, value);
      if (at.exists) add_bias(part.bias, p.bias_dtype, part.n, at.n, value);
    } else {
      repair<FewX<T>>(p, d, at.n, at.token, value);
      if (Mma::kFp4 && at.exists) divide_rows(p, p.scales, at.n, value);
      if (at.exists) add_bias(p, p.bias, at.n, value);
    }
    if (gated()) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float up = __shfl_down_sync(kAllLanes, value[e], 4);
        value[e] = __fdividef(value[e], 1 + __expf(-value[e])) * up;
      }
    }
    if (!at.exists || (at.place >= 4 && gated())) return;
    if constexpr (merged) {
      store_rows<T>(parts->part[at.part].y, parts->part[at.part].n, at.n, at.token, value);
    } else {
      store_rows<T>(p.y, p.n >> gated(), at.n, at.token, value);
    }
  }
};

// The kernel's body.
template <typename Mma, bool merged>
__device__ __forceinline__ void run(const Params& p, const SmemXParams& d, const MergedParts* parts) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using T = typename Mma::T;
  constexpr int kThreads = Mma::Tile::kThreads;
  const Cta<Mma, merged> cta(p, d, parts, ptx::shared_memory(shared));
  cta.prefetch_passes();
  if (d.normed && p.norm.weight != nullptr && threadIdx.x == 32 && blockIdx.x < 4) {
    ptx::prefetch_l2(p.norm.weight, p.k * 2);
  }
  auto ahead = cta.first();
  const auto bring = [&](auto x) {
    int unit = threadIdx.x / 16;
    x.seek(unit);
    ptx::wait_for_previous_kernel();
    ptx::launch_dependents();
    x.load();
    refill(cta, ahead, cta.ring);  // only one stage before x, on which all threads wait
    while (true) {
      x.store();
      unit += x.kAtOnce;
      if ((unit & ~1) >= d.steps * d.tokens) break;  // uniform for both units of a warp
      x.seek(unit);
      x.load();
    }
  };
  constexpr bool kNorms = std::is_same_v<T, __nv_bfloat16> && !Mma::kFp4;
  if (kNorms && d.normed) {
    if constexpr (kNorms) bring(NormedX<kThreads>(p, d, cta.shared));
  } else {
    bring(PlainX<T, kThreads>(p, d, cta.shared));
  }
  fill(cta, ahead, 1);
  if (threadIdx.x == 0) ptx::store_shared_16(cta.shared + d.zeros_offset, {0, 0, 0, 0});
  __syncthreads();
  if (d.normed) {  // the epilogue is the first to need the factors
    if (cta.slice < d.tokens) cta.factors().make(p, d.steps, cta.slice);
  }
  walk(cta, Mma(d, cta.shared), ahead, d.passes);
}

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, Mma::Tile::kCtasPerSm)
    sm90_skinny_smem_x(const __grid_constant__ Params p, const __grid_constant__ SmemXParams d) {
  run<Mma, false>(p, d, nullptr);
}

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, Mma::Tile::kCtasPerSm)
    sm90_skinny_smem_x_merged(const __grid_constant__ Params p, const __grid_constant__ SmemXParams d,
                              const __grid_constant__ MergedParts parts) {
  run<Mma, true>(p, d, &parts);
}

}  // namespace qao::gemm::sm90_skinny::smem
