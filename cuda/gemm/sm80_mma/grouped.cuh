// Portable grouped GEMM: the CTA of load.cuh with the weights of one expert and gathered rows of x.
#pragma once

#include "gemm/moe_routing.cuh"
#include "gemm/sm80_mma/grouped.h"
#include "gemm/sm80_mma/mainloop.cuh"

namespace qao::gemm::sm80_mma::grouped {

// Params with an expert's rows of y as its tokens. x stays that of all experts, with a stride of 0.
__device__ __forceinline__ Params params_of_expert(const Params& p, const Routing& r, const Share& share) {
  Params own = p;
  own.m = share.rows;
  own.weight = of_expert(p.weight, share.expert, r.weight_bytes);
  own.group_scales = of_expert(p.group_scales, share.expert, r.scales_bytes);
  own.block_scales = of_expert(p.block_scales, share.expert, r.scales_bytes);
  own.epilogue.scales = of_expert(p.epilogue.scales, share.expert, r.scales_bytes);
  own.epilogue.weight_sums = of_expert(p.epilogue.weight_sums, share.expert, r.sums_bytes);
  own.epilogue.bias = of_expert(p.epilogue.bias, share.expert, r.bias_bytes);
  return own;
}

template <typename Product, typename Tile>
struct Cta : sm80_mma::Cta<Product, Tile, false> {
  using Dense = sm80_mma::Cta<Product, Tile, false>;
  using typename Dense::EarlyRows;
  using typename Dense::KTile;

  const Routing& r;
  const int64_t row0;  // first row in y
  const uint32_t table;

  __device__ __forceinline__ Cta(const Params& params, const Routing& routing, const Share& share, const Place& at,
                                 uint32_t shared_address)
      : Dense(params, at, shared_address),
        r(routing),
        row0(share.begin + this->token0),
        table(shared_address + routing.table_at) {}

  __device__ __forceinline__ int64_t x_row(int token) const { return ptx::load_shared_int(table + token * 4); }

  __device__ __forceinline__ void fetch(int stage) const {
    const KTile to = this->k_tile_at(stage, this->k_tile);
    this->fetch_weight(to.weight);
    fetch_x(to);
  }
  __device__ __forceinline__ void fetch_x(const KTile& to) const {
    const Params& p = this->p;
    constexpr int kChunks = Dense::kXChunks, kRowBytes = Dense::kXRowBytes;
    const int columns = this->columns_left(), chunk = this->slice_thread % kChunks;
    if (columns >= kTileK && p.x_aligned) {
#pragma unroll
      for (int i = 0; i * Dense::kXAtOnce < Tile::kM; ++i) {
        const int token = this->slice_thread / kChunks + i * Dense::kXAtOnce;
        if (token < this->tokens)
          ptx::cp_async_16(to.x + swizzled<kRowBytes>(token, chunk), this->x + x_row(token) * r.x_stride);
      }
    } else {
      fetch_edges(to.x, this->x, table, r.x_stride, columns, this->tokens, p.x_aligned);
    }
    if constexpr (Dense::kInt4Weight) {
      fetch_sums(to.tokens);
    } else if constexpr (Dense::kBlocks && Product::kXBytes == 1) {
      if (p.block_scales == nullptr) return;
      for (int token = this->slice_thread; token < this->tokens; token += Tile::kSliceThreads) {
        ptx::cp_async_4(to.tokens + token * 4, p.x_block_scales + x_row(token) * p.k_tiles + this->k_tile);
      }
    }
  }
  // As Dense::fetch_edge, for gathered rows.
  static __device__ __noinline__ void fetch_edges(uint32_t to, const uint8_t* from, uint32_t table, int64_t stride,
                                                  int columns, int tokens, bool aligned) {
    using Element = std::conditional_t<Product::kXBytes == 1, uint8_t, uint16_t>;
    const int thread = threadIdx.x % Tile::kSliceThreads, chunk = thread % Dense::kXChunks;
#pragma unroll 1
    for (int token = thread / Dense::kXChunks; token < tokens; token += Dense::kXAtOnce) {
      const int64_t row = ptx::load_shared_int(table + token * 4);
      fetch_edge_chunk<Element>(to + swizzled<Dense::kXRowBytes>(token, chunk), from + row * stride, chunk, columns,
                                aligned);
    }
  }
  __device__ __forceinline__ void fetch_sums(uint32_t to) const {
    const Params& p = this->p;
    if (!this->begins_group(this->k_tile)) return;
    const int group = this->first_group(), exist = p.groups - group;
    for (int i = this->slice_thread; i < p.tile_groups * Tile::kM; i += Tile::kSliceThreads) {
      const int token = i % Tile::kM, g = i / Tile::kM;
      if (token >= this->tokens) continue;
      if (g < exist) {
        ptx::cp_async_4(to + i * 4, p.x_sums + x_row(token) * p.groups + group + g);
      } else {
        ptx::store_shared_4(to + i * 4, 0);
      }
    }
  }

  template <typename Sums>
  __device__ __forceinline__ void write_result(const Sums& sum, uint8_t* shared_memory, int of_pass, int,
                                               const EarlyRows& early) const {
    const Epilogue& e = this->p.epilogue;
    this->add_slices(sum, shared_memory, of_pass, early, [&](int token, int n, const Rows& rows, float (&value)[4]) {
      finish_four(e, rows, token_of(e, x_row(token)), value);
      scale_row(r, row0 + token, value);
      store_four(e.y, e.y_dtype, row0 + token, n, e.n, value);
    });
  }
};

// static: see sm80_mma::sm80_mma_grouped.
template <typename X, typename W, typename Tile>
static __global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm80_mma_grouped(const __grid_constant__ Params p, const __grid_constant__ Routing r) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using OfExpert = Cta<Product<X, W>, Tile>;
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
    const Epilogue& e = p.epilogue;
    const int first =
        p.run > 0 ? at.row_block * p.run + min(at.row_block, p.more_runs) : at.row_block * Tile::kRowTiles;
    const int count = p.run > 0 ? p.run + (at.row_block < p.more_runs) : Tile::kRowTiles;
    return write_zeros<Tile::kM>(share, e.y, e.y_dtype, e.n, first * kTileN, min((first + count) * kTileN, e.n));
  }
  const Params own = params_of_expert(p, r, share);
  fill_table<Tile::kM>(r, share, address + r.table_at);
  OfExpert cta(own, r, share, Place{at.row_block, share.token_block, 0, 0, p.parts * p.k_tiles}, address);
  cta.seek();
  Warp<X, W, Tile, OfExpert> warp{cta};
  warp.run(shared, 0);
}

// The kernel of a row, or null if the row does not support these operands.
template <XKind x, typename X, typename W, typename Tile>
constexpr Kernel kernel_for() {
  if constexpr (serves(x, Product<X, W>::kXBytes == 2)) {
    return &sm80_mma_grouped<X, W, Tile>;
  } else {
    return nullptr;
  }
}

}  // namespace qao::gemm::sm80_mma::grouped
