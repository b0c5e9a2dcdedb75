// Grouped GEMM of bfloat16 x and a packed weight for few rows per expert.
// The CTA of mainloop_ring_x.cuh or mma_fp4_ring_x.cuh runs parts of experts and gathers rows of x. Grid: [1, CTAs].
#pragma once

#include "gemm/sm90_skinny/grouped_tile_scheduler.cuh"
#include "gemm/sm90_skinny/mainloop_ring_x.cuh"

namespace qao::gemm::sm90_skinny::ring_x {

template <typename Tile, typename Base>
struct GroupedRing : Base {
  using Base::d, Base::lane, Base::p, Base::row_tile0, Base::row_tiles, Base::scales, Base::tokens, Base::weight;
  using Base::x_offset;
  using typename Base::Cursor;
  static constexpr int kTokens = Tile::kTokens, kOfLane = kTokens / Base::kRowsAtOnce;

  const Routing& r;
  const void* const bias;
  const int64_t row0;  // first row in y
  int rows[kOfLane];   // rows of x that this lane copies in part

  __device__ __forceinline__ GroupedRing(const Params& params, const RingXParams& cut, const Routing& routing,
                                         const Part& part, uint32_t shared)
      : Base(params, cut, shared), r(routing), bias(part.bias), row0(part.row0) {
    weight = part.weight, scales = part.scales;
    tokens = part.tokens, row_tile0 = part.row_tile0, row_tiles = part.row_tiles;
  }

  // Prologue, as fill_ring_x. `row` is the row of x of token `lane`. Weight copies are issued while that index is still
  // loading.
  __device__ __forceinline__ void fill(Cursor& ahead, int row) {
    Cursor at = ahead;
#pragma unroll 1
    for (int i = 0; i < d.stages - 1; ++i) {
      if (i > 0) this->advance(at);
      if (at.tiles > 0 && at.k_step < d.plain_steps) this->fetch_weight(at, this->stage_address(i));
    }
    if (threadIdx.x < kTokens) rows_of_x<kTokens>()[threadIdx.x] = row;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      // The cursor points to row lane / 16.
      rows[i] = __shfl_sync(~0u, row, i * Base::kRowsAtOnce + lane / 16) - lane / 16;
    }
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < d.stages - 1; ++i) {
      fetch_x(ahead, this->stage_address(i));
      ptx::cp_async_commit();
      this->advance(ahead);
    }
  }

  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (at.tiles > 0 && at.k_step < d.plain_steps) this->fetch_weight(at, stage);
    fetch_x(at, stage);
  }
  // Copies x, and everything else of a K-step that is not whole.
  __device__ __forceinline__ void fetch_x(const Cursor& at, uint32_t stage) const {
    if (at.tiles <= 0) return;
    if (at.k_step >= d.plain_steps) {
      return fetch_edge(p, d, tokens, at.k_step, at.tiles, at.weight, at.scales, at.x - lane / 16 * p.x_stride, stage);
    }
    const uint32_t to = stage + d.x_offset + x_offset(lane / 16, lane % 16);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = i * Base::kRowsAtOnce;
      if (i > 0 && token >= tokens) break;
      ptx::cp_async_16_if(token < tokens - lane / 16, (to ^ (token % 8 << 4)) + token * kStepColumns * 2,
                          at.x + rows[i] * p.x_stride);
    }
  }
  // As Base::fetch_slowly for gathered rows. `x` points to row 0.
  static __device__ __noinline__ void fetch_edge(const Params& p, const RingXParams& d, int tokens, int k_step,
                                                 int tiles, const uint8_t* weight, const uint8_t* scales, const T* x,
                                                 uint32_t stage) {
    Base::fetch_weight_slowly(p, d, k_step, tiles, weight, scales, stage);
    const int lane = threadIdx.x % 32, chunk = lane % 16, columns = p.k - k_step * kStepColumns;
    for (int token = lane / 16; token < tokens; token += Base::kRowsAtOnce) {
      const T* from = x + rows_of_x<kTokens>()[token] * p.x_stride;
      const uint32_t to = stage + d.x_offset + x_offset(token, chunk);
      if (p.x_aligned && (chunk + 1) * 8 <= columns) {
        ptx::cp_async_16(to, from);
        continue;
      }
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = chunk * 8 + i < columns ? from[i] : T(0.0f);
      ptx::store_shared_16(to, *reinterpret_cast<const uint4*>(values));
    }
  }

  // Epilogue of the `slots` passes from `pass` on: adds the partial sums and stores y.
  __device__ __forceinline__ void write(int pass, int slots) const {
    __syncthreads();
    this->for_each_quad(pass, slots, 0, 1, [&](int slot, int token, int quad, int n, bool exists) {
      float value[4] = {};
      if (exists) this->add_slices(slot, token, quad, value);
      repair<GatheredX<kTokens>>(p, d, weight, scales, n, token, value);
      if (exists) {
        if constexpr (Base::kFp4) divide_rows(p, scales, n, value);
        add_bias(p, bias, n, value);
        scale_row(r, row0 + token, value);
        store_rows<T>(p.y, p.n, n, row0 + token, value);
      }
    });
  }
};

template <typename Tile, typename Base>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm90_skinny_grouped_ring_x(const __grid_constant__ Params p, const __grid_constant__ RingXParams cut,
                               const __grid_constant__ Routing r, const __grid_constant__ Spread spread) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = GroupedRing<Tile, Base>;
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();  // it may have written the routing
  ptx::launch_dependents();
  for_each_part<Tile::kTokens>(p, r, spread, blockIdx.y, gridDim.y, [&](const Part& part) {
    Cta cta(p, cut, r, part, ptx::shared_address(shared));
    auto ahead = cta.first();
    cta.fill(ahead, static_cast<int>(x_row(r, cta.row0 + min(cta.lane, cta.tokens - 1))));
    const auto units = cta.units();
    const uint32_t parameters = ptx::opaque(cta.parameters());
    const int passes = (cta.row_tiles + Tile::kTilesN - 1) / Tile::kTilesN;
    walk<Tile>(cta, ahead, units, parameters, passes, [&](int pass, int slots) {
      cta.write(pass, slots);
      if (pass + slots < passes) __syncthreads();
    });
  });
}

}  // namespace qao::gemm::sm90_skinny::ring_x
