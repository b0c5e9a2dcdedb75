// Work distribution of the grouped skinny-GEMM kernels: parts of a CTA, their rows of x and their epilogue.
#pragma once

#include "gemm/moe_routing.cuh"
#include "gemm/sm90_skinny/grouped.h"
#include "gemm/sm90_skinny/mainloop.cuh"

namespace qao::gemm::sm90_skinny {

// Row of x of each token of a part.
template <int tokens>
__device__ __forceinline__ int* rows_of_x() {
  __shared__ int rows[tokens];
  return rows;
}

// Element `k` of token `token` of the original x.
template <int tokens>
struct GatheredX {
  const Params& p;
  int token;
  __device__ __forceinline__ float operator()(int k) const {
    return load_float(p.x, rows_of_x<tokens>()[token] * p.x_stride + k, DType::kBFloat16);
  }
};

// A block of rows of an expert and a run of its n-tiles.
struct Part {
  const uint8_t *weight, *scales;  // of the expert
  const void* bias;
  int64_t row0;  // in y
  int tokens, row_tile0, row_tiles;
};

// Calls use(part) for each part of this CTA. Rows of y that belong to no expert become zeros.
template <int tile_m, typename Use>
__device__ __forceinline__ void for_each_part(const Params& p, const Routing& r, const Spread& spread, int cta,
                                              int ctas, const Use& use) {
  int end = cta + 1;
#pragma unroll 1
  for (int at = cta; at < end; at += ctas) {
    RowsAndTiles all;
    int parts;
    const auto choose = [&](int tiles) {
      parts = sharing(spread, tiles);
      return at / parts;
    };
    const Share share = find_share<tile_m>(r, choose, all);
    if (at == cta && all.rows < r.rows) write_rest(r, all.rows, p.y, p.y_dtype, p.n, cta, ctas, blockDim.x);
    if (share.rows == 0) return;
    end = parts * all.tiles;
    const int row = share.token_block * tile_m, part = at % parts, each = p.row_tiles / parts,
              more = p.row_tiles % parts;
    use(Part{of_expert(p.weight, share.expert, r.weight_bytes), of_expert(p.scales, share.expert, r.scales_bytes),
             of_expert(p.bias, share.expert, r.bias_bytes), share.begin + int64_t{row}, min(share.rows - row, tile_m),
             part * each + min(part, more), each + (part < more)});
    __syncthreads();  // shared memory may be reused
  }
}

// CTA of a dense kernel that runs a part.
template <typename Base>
struct Grouped : Base {
  using Base::d, Base::p, Base::scales, Base::weight;
  using Tile = typename Base::Tile;
  static constexpr int kTokens = Tile::kTokens;
  const Routing& r;
  const void* const bias;
  const int64_t row0;  // first row in y

  template <typename Cut>
  __device__ __forceinline__ Grouped(const Params& params, const Cut& cut, const Routing& routing, const Part& part,
                                     uint32_t shared)
      : Base(params, cut, shared), r(routing), bias(part.bias), row0(part.row0) {
    weight = part.weight, scales = part.scales;
    this->tokens = part.tokens, this->row_tile0 = part.row_tile0, this->row_tiles = part.row_tiles;
  }
  __device__ __forceinline__ int passes() const { return (this->row_tiles + Tile::kTilesN - 1) / Tile::kTilesN; }
  // Row of x of token `lane`.
  __device__ __forceinline__ int row_of_lane() const {
    return static_cast<int>(x_row(r, row0 + min(this->lane, this->tokens - 1)));
  }

  __device__ __forceinline__ void finish(const Quad& at, float (&value)[4]) const {
    repair<GatheredX<kTokens>>(p, d, weight, scales, at.n, at.token, value);
    if (!at.exists) return;
    if constexpr (Base::kFp4) divide_rows(p, scales, at.n, value);
    add_bias(p, bias, at.n, value);
    scale_row(r, row0 + at.token, value);
    store_rows<__nv_bfloat16>(p.y, p.n, at.n, row0 + at.token, value);
  }
};

}  // namespace qao::gemm::sm90_skinny
