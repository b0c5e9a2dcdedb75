// Grouped products of a bfloat16 x and a packed weight for few rows an expert: a CTA of ring.cuh or ring_fp4.cuh with a
// run of row tiles of one expert, and rows of x that lie anywhere. Grid: [1, CTAs that share an expert's row tiles,
// tiles of rows].
#pragma once

#include "mm/routing.cuh"
#include "mm/stream/grouped.h"
#include "mm/stream/ring.cuh"

namespace qao::mm::stream::x_ring {

// The row of x of each token of the CTA.
template <int tokens>
__device__ __forceinline__ int* rows_of_x() {
  __shared__ int rows[tokens];
  return rows;
}

// Token `token` of x as it was given.
template <int tokens>
struct GatheredX {
  const Params& p;
  int token;
  __device__ __forceinline__ float operator()(int k) const {
    return load_float(p.x, rows_of_x<tokens>()[token] * p.x_stride + k, DType::kBFloat16);
  }
};

template <typename Tile, typename Base>
struct GroupedRing : Base {
  using Base::d, Base::lane, Base::p, Base::x_offset;
  using typename Base::Cursor;
  static constexpr int kTokens = Tile::kTokens, kOfLane = kTokens / Base::kRowsAtOnce;

  const Routing& r;
  const int64_t row0;  // of y, the first token's
  int rows[kOfLane];   // of x, those that this lane copies a part of

  // p.y begins with the first token's row.
  __device__ __forceinline__ GroupedRing(const Params& params, const RingParams& cut, const Routing& routing,
                                         int64_t first, uint32_t shared)
      : Base(params, cut, shared), r(routing), row0(first) {
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      // A cursor points to row lane / 16.
      rows[i] = rows_of_x<kTokens>()[min(i * Base::kRowsAtOnce + lane / 16, d.tokens - 1)] - lane / 16;
    }
  }

  __device__ __forceinline__ void fetch(const Cursor& at, uint32_t stage) const {
    if (at.tiles <= 0) return;
    if (at.k_step >= d.plain_steps) {
      return fetch_edge(p, d, at.k_step, at.tiles, at.weight, at.scales, at.x - lane / 16 * p.x_stride, stage);
    }
    this->fetch_weight(at, stage);
    const uint32_t to = stage + d.x_offset + x_offset(lane / 16, lane % 16);
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      const int token = i * Base::kRowsAtOnce;
      if (i > 0 && token >= d.tokens) break;
      ptx::cp_async_16_if(token < d.tokens - lane / 16, (to ^ (token % 8 << 4)) + token * kStepColumns * 2,
                          at.x + rows[i] * p.x_stride);
    }
  }
  // Base::fetch_slowly for these rows; `x` points to row 0.
  static __device__ __noinline__ void fetch_edge(const Params& p, const RingParams& d, int k_step, int tiles,
                                                 const uint8_t* weight, const uint8_t* scales, const T* x,
                                                 uint32_t stage) {
    Base::fetch_weight_slowly(p, d, k_step, tiles, weight, scales, stage);
    const int lane = threadIdx.x % 32, chunk = lane % 16, columns = p.k - k_step * kStepColumns;
    for (int token = lane / 16; token < d.tokens; token += Base::kRowsAtOnce) {
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

  // Adds the slices of the `slots` passes from `pass` on, and stores y.
  __device__ __forceinline__ void write(int pass, int slots) const {
    __syncthreads();
    this->for_each_quad(pass, slots, 0, 1, [&](int slot, int token, int quad, int n, bool exists) {
      float value[4] = {};
      if (exists) this->add_slices(slot, token, quad, value);
      repair<GatheredX<kTokens>>(p, d, n, token, value);
      if (exists) {
        if constexpr (Base::kFp4) divide_rows(p, n, value);
        add_bias(p, n, value);
        scale_row(r, row0 + token, value);
        store_rows<T>(p, p.n, n, token, value);
      }
    });
  }
};

template <typename Tile, typename Base>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    grouped_ring_kernel(const __grid_constant__ Params p, const __grid_constant__ RingParams cut,
                        const __grid_constant__ Routing r) {
  extern __shared__ __align__(1024) uint8_t shared[];
  using Cta = GroupedRing<Tile, Base>;
  ptx::wait_for_previous_kernel();  // whose the routing may be
  ptx::launch_dependents();
  const Share share = find_share<Tile::kTokens>(r, blockIdx.z);
  if (share.rows == 0) return;
  const int block = blockIdx.y, first = block * cut.row_tiles + min(block, cut.more_row_tiles);  // row tile
  const int64_t row0 = share.begin + int64_t{share.token_block} * Tile::kTokens;
  if (share.expert == r.experts) {
    const int last = first + cut.row_tiles + (block < cut.more_row_tiles);
    return write_zeros<Tile::kTokens>(share, p.y, p.y_dtype, p.n, first * kTileN, min(last * kTileN, p.n));
  }
  Params own = params_of_expert(p, r, share);
  own.y = static_cast<T*>(p.y) + row0 * p.n;
  if (threadIdx.x < min(cut.row_tiles, Tile::kTilesN)) {  // while rows of x are looked up
    const int row_tile = first + threadIdx.x;
    ptx::prefetch_l2(own.weight + row_tile * cut.row_tile_bytes,
                     static_cast<int>(min(cut.row_tile_bytes, int64_t{kPrefetchBytes})));
    ptx::prefetch_l2(own.scales + row_tile * cut.row_tile_scale_bytes, static_cast<int>(cut.row_tile_scale_bytes));
  }
  RingParams d = cut;
  d.tokens = min(share.rows - share.token_block * Tile::kTokens, Tile::kTokens);
  fill_table<Tile::kTokens>(r, share, ptx::shared_address(rows_of_x<Tile::kTokens>()));
  const Cta cta(own, d, r, row0, ptx::shared_address(shared));

  auto ahead = cta.first();
  const auto units = cta.units();
  const uint32_t parameters = ptx::opaque(cta.parameters());
  walk<Tile>(cta, ahead, units, parameters, [&](int pass, int slots) {
    cta.write(pass, slots);
    if (pass + slots < d.passes) __syncthreads();
  });
}

}  // namespace qao::mm::stream::x_ring
