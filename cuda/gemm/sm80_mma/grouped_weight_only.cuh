// Portable W4A16 grouped GEMM.
// It is the CTA of weight_only_mainloop.cuh or weight_only_fp4.cuh with the weights of one expert and gathered rows of
// x.
#pragma once

#include <array>

#include "gemm/moe_routing.cuh"
#include "gemm/sm80_mma/grouped.h"
#include "gemm/sm80_mma/weight_only_fraction.cuh"
#include "gemm/sm80_mma/weight_only_mainloop.cuh"

namespace qao::gemm::sm80_mma::grouped {

using weight_only::kTileK;

// `Dense` is the CTA of weight_only_mainloop.cuh or weight_only_fp4.cuh.
template <typename T, typename Tile, typename Dense>
struct FloatCta : Dense {
  using typename Dense::Sums;

  const Routing& r;
  const int64_t row0;  // first row in y
  const uint32_t table;

  __device__ __forceinline__ FloatCta(const Int4Params& params, const Routing& routing, const Share& share,
                                      int row_block, uint32_t shared_address)
      : Dense(params, row_block, share.token_block, shared_address),
        r(routing),
        row0(share.begin + this->token0),
        table(shared_address + routing.table_at) {}

  __device__ __forceinline__ int64_t x_row(int token) const { return ptx::load_shared_int(table + token * 4); }

  __device__ __forceinline__ void fetch(int stage) const {
    const uint32_t to = this->stage_address(stage);
    this->fetch_weight(to);
    fetch_x(Dense::x_address(to));
    this->fetch_scales(Dense::scale_address(to));
  }
  __device__ __forceinline__ void fetch_x(uint32_t to) const {
    const int columns = this->p.k - this->k_tile * kTileK, chunk = this->slice_thread % 8;
    if (!this->p.x_aligned || columns < kTileK) {
      return fetch_edges(to, this->x, table, r.x_stride, columns, this->tokens);
    }
#pragma unroll
    for (int i = 0; i * Dense::kRowsAtOnce < Tile::kM; ++i) {
      const int token = this->slice_thread / 8 + i * Dense::kRowsAtOnce;
      if (token < this->tokens)
        ptx::cp_async_16(to + Dense::x_offset(token, chunk), this->x + x_row(token) * r.x_stride);
    }
  }
  // As Dense::fetch_x_edge, for gathered rows.
  static __device__ __noinline__ void fetch_edges(uint32_t to, const T* x, uint32_t table, int64_t stride, int columns,
                                                  int tokens) {
    const int thread = threadIdx.x % Tile::kSliceThreads, chunk = thread % 8;
    for (int token = thread / 8; token < tokens; token += Dense::kRowsAtOnce) {
      const T* from = x + ptx::load_shared_int(table + token * 4) * stride;
      T values[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) values[i] = chunk * 8 + i < columns ? from[i] : T(0.0f);
      ptx::store_shared_16(to + Dense::x_offset(token, chunk), *reinterpret_cast<const uint4*>(values));
    }
  }

  __device__ __forceinline__ void write_result(const Sums& sum, float* tile) const {
    const Int4Params& p = this->p;
    this->add_slices(sum, tile, [&](int token, int n, float (&value)[4]) {
      if (r.x_sums != nullptr) {
        weight_only::add_fractions(p.scales, p.scale_dtype, p.groups, n, r.x_sums + x_row(token) * p.groups, value);
      }
      scale_row(r, row0 + token, value);
      store_four(p.y, p.y_dtype, row0 + token, n, p.n, value);
    });
  }
};

// `Weight` provides Dense<T, Tile> of a weight format and its main_loop(p, cta, k_tiles, sum).
template <typename T, typename Tile, typename Weight>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm80_mma_grouped_weight_only(const __grid_constant__ Int4Params p, const __grid_constant__ Routing r) {
  using Dense = typename Weight::template Dense<T, Tile>;
  extern __shared__ __align__(1024) uint8_t shared[];
#if __CUDA_ARCH__ >= 900
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();
#endif
  const TileIndex at = tile_of(r);
  const Share share = find_share<Tile::kM>(r, at.tokens);
  if (share.rows == 0) return;
  const uint32_t address = ptx::shared_address(shared);
  // Rows that belong to no expert become zeros
  if (share.expert == r.experts) {
    const int first = at.row_block * Tile::kN;
    return write_zeros<Tile::kM>(share, p.y, p.y_dtype, p.n, first, min(first + Tile::kN, p.n));
  }
  const Int4Params own = params_of_expert(p, r, share);
  fill_table<Tile::kM>(r, share, address + r.table_at);
  FloatCta<T, Tile, Dense> cta(own, r, share, at.row_block, address);
  typename Dense::Sums sum = {};
  Weight::template main_loop<T, Tile>(p, cta, p.parts * p.k_tiles, sum);
  cta.write_result(sum, reinterpret_cast<float*>(shared));
}

template <typename T, typename Weight>
constexpr std::array kKernels = {
#define QAO_TILE(rows, ...) \
  static_cast<WeightOnlyKernel>(&sm80_mma_grouped_weight_only<T, weight_only::Tile<__VA_ARGS__>, Weight>),
#include "gemm/sm80_mma/grouped_weight_only_tiles.inc"
#undef QAO_TILE
};

template <typename Weight>
WeightOnlyKernel kernel_of(int config, bool half) {
  return half ? kKernels<__half, Weight>[config] : kKernels<__nv_bfloat16, Weight>[config];
}

}  // namespace qao::gemm::sm80_mma::grouped
