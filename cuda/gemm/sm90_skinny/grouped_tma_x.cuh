// Grouped GEMM of bfloat16 x and an int4 weight for a moderate number of rows per expert.
// The CTA of tma_x.cuh runs parts of experts. Gathered rows of x cannot be one TMA box, so each warp copies the columns
// of its K-steps with cp.async in the first pass of a part. Grid: CTAs.
#pragma once

#include "gemm/sm90_skinny/grouped_tile_scheduler.cuh"
#include "gemm/sm90_skinny/tma_x.cuh"

namespace qao::gemm::sm90_skinny::tma_x {

template <typename Mma>
struct GroupedCta : Grouped<Cta<Mma>> {
  using Base = Grouped<Cta<Mma>>;
  using Base::Base, Base::kTokens, Base::lane, Base::p, Base::row_tiles, Base::shared, Base::tokens;
  using typename Base::Cursor, typename Base::T;
  static constexpr int kRowsAtOnce = 2;

  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    this->fetch_weight(at, stage);
    if (at.tiles == row_tiles) fetch_x(at.step);
  }
  __device__ __forceinline__ void fetch_x(int step) const {
    const int chunk = lane % 8, token0 = lane / 16;
    const uint32_t to = shared + step * Mma::kStepX + lane % 16 / 8 * Mma::kBoxBytes + token0 * kBoxRowBytes;
    const T* from = static_cast<const T*>(p.x) + step * kStepColumns + lane % 16 * 8;
#pragma unroll
    for (int i = 0; i < kTokens / kRowsAtOnce; ++i) {
      const int token = token0 + i * kRowsAtOnce;
      if (i > 0 && i * kRowsAtOnce >= tokens) break;
      ptx::cp_async_16_if(token < tokens, to + i * kRowsAtOnce * kBoxRowBytes + ((chunk ^ token % 8) << 4),
                          from + rows_of_x<kTokens>()[token] * p.x_stride);
    }
  }
  __device__ __forceinline__ void wait_for_x(int) const {}  // x is copied together with the weights
};

template <typename Mma>
__global__ void __launch_bounds__(Mma::Tile::kThreads, 1)
    sm90_skinny_grouped_tma_x(const __grid_constant__ Params p, const __grid_constant__ TmaXParams cut,
                              const __grid_constant__ Routing r, const __grid_constant__ Spread spread) {
  extern __shared__ __align__(1024) uint8_t memory[];
  constexpr int kTokens = Mma::Tile::kTokens;
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();  // it may have written the routing
  ptx::launch_dependents();
  for_each_part<kTokens>(p, r, spread, blockIdx.x, gridDim.x, [&](const Part& part) {
    const GroupedCta<Mma> cta(p, cut, r, part, ptx::shared_memory(memory));
    if (threadIdx.x < kTokens) rows_of_x<kTokens>()[threadIdx.x] = cta.row_of_lane();
    __syncthreads();
    auto ahead = cta.first();
    fill(cta, ahead);
    walk(cta, cta.mma(), ahead, cta.passes());
  });
}

}  // namespace qao::gemm::sm90_skinny::tma_x
