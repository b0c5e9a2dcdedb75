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

// See DenseRows.
struct GatheredRows {
  static constexpr bool kGathers = true;

  const Routing& r;
  const int64_t row0;    // first row of the CTA in y
  const uint32_t table;  // shared address: the row of x of each token

  template <typename Cta>
  __device__ __forceinline__ int64_t row(const Cta&, int token) const {
    return ptx::load_shared_int(table + token * 4);
  }
  template <typename Cta>
  __device__ __forceinline__ void write(const Cta& cta, int, int token, int n, const Rows& rows,
                                        float (&value)[4]) const {
    const Epilogue& e = cta.p.epilogue;
    finish_four<Cta::kScaled>(e, rows, cta.token_at(token), value);
    if constexpr (Cta::kFractions) {
      const Fractions fractions = fractions_of(cta.p);
      if (fractions.x_sums != nullptr) add_fractions(fractions, n, cta.x_row(token), value);
    }
    scale_row(r, row0 + token, value);
    store_four(e.y, e.y_dtype, row0 + token, n, e.n, value);
  }
};

// static: see sm80_mma::sm80_mma_grouped.
template <typename X, typename W, typename Tile>
static __global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    sm80_mma_grouped(const __grid_constant__ Params p, const __grid_constant__ Routing r) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = sm80_mma::Cta<Product<X, W>, Tile, false, GatheredRows>;
#if __CUDA_ARCH__ >= 900
  prefetch_routing(r);
  ptx::wait_for_previous_kernel();
#endif
  const TileIndex at = tile_of(r);
  const Share share = find_share<Tile::kM>(r, at.tokens);
  if (share.rows == 0) return;
  const uint32_t address = ptx::shared_memory(shared), table = address + r.table_at;
  // Rows that belong to no expert become zeros
  if (share.expert == r.experts) {
    const Epilogue& e = p.epilogue;
    const int first =
        p.run > 0 ? at.row_block * p.run + min(at.row_block, p.more_runs) : at.row_block * Tile::kRowTiles;
    const int count = p.run > 0 ? p.run + (at.row_block < p.more_runs) : Tile::kRowTiles;
    return write_zeros<Tile::kM>(share, e.y, e.y_dtype, e.n, first * kTileN, min((first + count) * kTileN, e.n));
  }
  const Params own = params_of_expert(p, r, share);
  fill_table<Tile::kM>(r, share, table);
  const GatheredRows rows{r, share.begin + static_cast<int64_t>(share.token_block) * Tile::kM, table};
  Cta cta(own, Place{at.row_block, share.token_block, 0, 0, p.parts * p.k_tiles}, address, rows);
  cta.seek();
  Warp<X, W, Tile, Cta> warp{{}, cta};
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
