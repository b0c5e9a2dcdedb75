// Grouped GEMM of bfloat16 x and a packed weight for few rows per expert.
// The CTA of ring_x.cuh runs parts of experts and gathers rows of x. Grid: [1, CTAs].
#pragma once

#include "gemm/sm90_skinny/grouped_tile_scheduler.cuh"
#include "gemm/sm90_skinny/ring_x.cuh"

namespace qao::gemm::sm90_skinny::ring_x {

template <typename Mma>
struct GroupedCta : Grouped<Cta<Mma>> {
  using Base = Grouped<Cta<Mma>>;
  using Base::Base, Base::d, Base::kRowsAtOnce, Base::kTokens, Base::lane, Base::p, Base::tokens;
  using typename Base::Cursor;
  static constexpr int kOfLane = kTokens / kRowsAtOnce;

  int rows[kOfLane];  // rows of x that this lane copies in part, relative to row lane / 16

  // Prologue, as fill(). `row` is the row of x of token `lane`. Weight copies are issued while that index is still
  // loading.
  __device__ __forceinline__ void fill(Cursor& ahead, int row) {
    Cursor at = ahead;
#pragma unroll 1
    for (int i = 0; i < d.stages - 1; ++i) {
      if (i > 0) advance(*this, at);
      if (at.tiles > 0 && at.step < d.plain_steps) this->fetch_weight(at, this->stage_address(i));
    }
    if (threadIdx.x < kTokens) rows_of_x<kTokens>()[threadIdx.x] = row;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) rows[i] = __shfl_sync(~0u, row, i * kRowsAtOnce + lane / 16) - lane / 16;
    __syncthreads();
#pragma unroll 1
    for (int i = 0; i < d.stages - 1; ++i) {
      fetch_x(ahead, this->stage_address(i));
      ptx::cp_async_commit();
      advance(*this, ahead);
    }
  }

  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (at.tiles > 0 && at.step < d.plain_steps) this->fetch_weight(at, stage);
    fetch_x(at, stage);
  }
  // Copies x, and everything else of a K-step that is not whole.
  __device__ __forceinline__ void fetch_x(const Cursor& at, uint32_t stage) const {
    if (at.tiles <= 0) return;
    if (at.step >= d.plain_steps) return fetch_slowly(p, d, tokens, at.step, at.tiles, at.weight, at.scales, stage);
    const T* x = this->x_at(at.step);
    const uint32_t to = stage + d.x_offset + x_offset(lane / 16, lane % 16);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = i * kRowsAtOnce;
      if (i > 0 && token >= tokens) break;
      ptx::cp_async_16_if(token < tokens - lane / 16, (to ^ (token % 8 << 4)) + token * kStepColumns * 2,
                          x + rows[i] * p.x_stride);
    }
  }
  static __device__ __noinline__ void fetch_slowly(const Params& p, const RingXParams& d, int tokens, int step,
                                                   int tiles, const uint8_t* weight, const uint8_t* scales,
                                                   uint32_t stage) {
    Base::fetch_edge(p, d, tokens, step, tiles, weight, scales, stage,
                     [](int token) { return rows_of_x<kTokens>()[token]; });
  }
};

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, Mma::Tile::kCtasPerSm)
    sm90_skinny_grouped_ring_x(const __grid_constant__ Params p, const __grid_constant__ RingXParams cut,
                               const __grid_constant__ Routing r, const __grid_constant__ Spread spread) {
  extern __shared__ __align__(1024) uint8_t shared[];
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();  // it may have written the routing
  ptx::launch_dependents();
  for_each_part<Mma::Tile::kTokens>(p, r, spread, blockIdx.y, gridDim.y, [&](const Part& part) {
    GroupedCta<Mma> cta(p, cut, r, part, ptx::shared_memory(shared));
    auto ahead = cta.first();
    cta.fill(ahead, cta.row_of_lane());
    walk(cta, cta.mma(), ahead, cta.passes());
  });
}

}  // namespace qao::gemm::sm90_skinny::ring_x
