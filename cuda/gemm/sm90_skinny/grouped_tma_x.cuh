// Grouped GEMM of bfloat16 x and an int4 weight for a moderate number of rows per expert.
// The CTA of mainloop_tma_x.cuh runs parts of experts. Gathered rows of x cannot be one TMA box, so each warp copies
// the columns of its K-steps with cp.async in the first pass of a part. Grid: CTAs.
#pragma once

#include "gemm/sm90_skinny/grouped_tile_scheduler.cuh"
#include "gemm/sm90_skinny/mainloop_tma_x.cuh"

namespace qao::gemm::sm90_skinny::tma_x {

template <typename Tile, bool zeros, bool half>
struct GroupedTma : Tma<Tile, __nv_bfloat16, zeros, half> {
  using Base = Tma<Tile, __nv_bfloat16, zeros, half>;
  using T = __nv_bfloat16;
  using Base::d, Base::lane, Base::p, Base::row_tile0, Base::row_tiles, Base::scales, Base::tokens, Base::weight,
      Base::x;
  using typename Base::Cursor;
  static constexpr int kRowsAtOnce = 2, kTokens = Tile::kTokens;

  const Routing& r;
  const void* const bias;
  const int64_t row0;  // first row in y

  __device__ __forceinline__ GroupedTma(const Params& params, const TmaXParams& cut, const Routing& routing,
                                        const Part& part, uint32_t shared)
      : Base(params, cut, shared), r(routing), bias(part.bias), row0(part.row0) {
    weight = part.weight, scales = part.scales;
    tokens = part.tokens, row_tile0 = part.row_tile0, row_tiles = part.row_tiles;
  }

  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    this->fetch_weight(at, stage);
    if (at.tiles == row_tiles) fetch_x(at.step);
    ptx::cp_async_commit();
  }
  __device__ __forceinline__ void fetch_x(int step) const {
    const int chunk = lane % 8, token0 = lane / 16;
    const uint32_t to = x + step * Base::kStepX + lane % 16 / 8 * Base::kBoxBytes + token0 * kBoxRowBytes;
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

  __device__ __forceinline__ void write(int pass) const {
    this->for_each_quad(pass, [&](int token, int n, bool exists, float (&value)[4]) {
      repair<GatheredX<kTokens>>(p, d, weight, scales, n, token, value);
      if (!exists) return;
      add_bias(p, bias, n, value);
      scale_row(r, row0 + token, value);
      store_rows<T>(p.y, p.n, n, row0 + token, value);
    });
  }
};

template <typename Tile, bool zeros, bool half>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    sm90_skinny_grouped_tma_x(const __grid_constant__ Params p, const __grid_constant__ TmaXParams cut,
                              const __grid_constant__ Routing r, const __grid_constant__ Spread spread) {
  extern __shared__ __align__(1024) uint8_t memory[];
  using Cta = GroupedTma<Tile, zeros, half>;
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();  // it may have written the routing
  ptx::launch_dependents();
  for_each_part<Tile::kTokens>(p, r, spread, blockIdx.x, gridDim.x, [&](const Part& part) {
    const Cta cta(p, cut, r, part, ptx::shared_address(memory));
    if (threadIdx.x < Tile::kTokens) {
      const int64_t row = cta.row0 + min(cta.lane, cta.tokens - 1);
      rows_of_x<Tile::kTokens>()[threadIdx.x] = static_cast<int>(x_row(r, row));
    }
    __syncthreads();
    auto ahead = cta.first();
#pragma unroll 1
    for (int i = 0; i < Tile::kStages - 1; ++i) {
      cta.fetch(ahead, cta.ring + i * cta.kStageBytes);
      cta.advance(ahead);
    }
    walk(cta, ahead, (cta.row_tiles + Tile::kTilesN - 1) / Tile::kTilesN);
  });
}

}  // namespace qao::gemm::sm90_skinny::tma_x
