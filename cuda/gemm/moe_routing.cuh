// Mapping from a CTA to an expert's rows, computed on the device.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "gemm/moe_routing.h"

namespace qao::gemm {

// Rasterization in panels of 16 token tiles. CTAs of one row block are consecutive in a panel (common/place.cuh), so
// that neighboring token tiles of one expert read its weights from L2.
struct TileIndex {
  int row_block, tokens;
};
__device__ __forceinline__ TileIndex tile_of(const Routing& r) {
  constexpr int kPanel = 16;
  const int block = blockIdx.x, panel = block / (kPanel * r.row_blocks), inside = block % (kPanel * r.row_blocks);
  const int width = min(kPanel, r.token_tiles - panel * kPanel);
  return {inside / width, panel * kPanel + inside % width};
}

// Rows of one expert; expert == r.experts: rows without an expert. rows == 0: the CTA has no work.
struct Share {
  int expert, begin, rows;  // of y
  int token_block;          // index of the block of tile_m rows within them
};

// Prefetches the ends of experts and the first row indices into L2 before the PDL wait. The previous kernel may still
// write them; L2 is coherent with its stores. Run by the first warp, one cache line per lane.
__device__ __forceinline__ void prefetch_routing(const Routing& r) {
  constexpr int kLine = 128;
  const int at = threadIdx.x * kLine;
  if (threadIdx.x >= 32) return;
  if (at < r.experts * 4) ptx::prefetch_l2_line(reinterpret_cast<const uint8_t*>(r.ends) + at);
  if (r.row_index != nullptr && at < int64_t{r.rows} * (r.wide_index ? 8 : 4))
    ptx::prefetch_l2_line(static_cast<const uint8_t*>(r.row_index) + at);
}

struct RowsAndTiles {
  int rows, tiles;
};

// Exclusive scan of the lanes' values under `add`, and their total.
struct Scanned {
  int before, all;
};
template <typename Add>
__device__ __forceinline__ Scanned scan(int value, const Add& add) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, value, distance);
    if (lane >= distance) value = add(value, other);
  }
  const int before = __shfl_up_sync(~0u, value, 1);
  return {lane == 0 ? 0 : before, __shfl_sync(~0u, value, 31)};
}

// Four consecutive experts per lane. The first one has the rows [begin, end[0]), each other one [end[i - 1], end[i]).
// `tiles` are their tiles of `tile_m` rows, `tiles_before` the tiles of all experts before them.
constexpr int kOfLane = 4, kAtOnce = 32 * kOfLane;
struct OfLane {
  int first;  // expert
  int begin, end[kOfLane];
  int tiles_before, tiles[kOfLane];
  __device__ __forceinline__ int begin_of(int i) const { return i > 0 ? end[i - 1] : begin; }
};
// Scans the next kAtOnce experts from `from` on with the whole warp, and adds them to the running totals `all`. An
// expert begins at the largest end before it, since ends may hold any values. Experts past the last one have no rows.
template <int tile_m>
__device__ __forceinline__ OfLane next_experts(const Routing& r, int from, RowsAndTiles& all) {
  OfLane own;
  own.first = from + threadIdx.x % 32 * kOfLane;
  int largest = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    const int end = own.first + i < r.experts ? min(r.ends[own.first + i], r.limit) : 0;
    own.end[i] = largest = max(largest, end);
  }
  const Scanned rows = scan(largest, [](int x, int y) { return max(x, y); });
  own.begin = max(all.rows, rows.before);
  int own_tiles = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    own.end[i] = max(own.begin, own.end[i]);
    own.tiles[i] = (own.end[i] - own.begin_of(i) + tile_m - 1) / tile_m;
    own_tiles += own.tiles[i];
  }
  const Scanned tiles = scan(own_tiles, [](int x, int y) { return x + y; });
  own.tiles_before = all.tiles + tiles.before;
  all.rows = max(all.rows, rows.all), all.tiles += tiles.all;
  return own;
}

// Calls use(expert, begin, end, first_tile) for each expert of this lane: its rows of y are [begin, end), and
// first_tile counts the tiles before it. Returns the totals. Executed by a whole warp.
template <int tile_m, typename Use>
__device__ __forceinline__ RowsAndTiles for_each_expert(const Routing& r, const Use& use) {
  RowsAndTiles all = {0, 0};
#pragma unroll 1
  for (int from = 0; from < r.experts; from += kAtOnce) {
    const OfLane own = next_experts<tile_m>(r, from, all);
    int before = own.tiles_before;
#pragma unroll
    for (int i = 0; i < kOfLane; ++i) {
      if (own.first + i < r.experts) use(own.first + i, own.begin_of(i), own.end[i], before);
      before += own.tiles[i];
    }
  }
  return all;
}

// Finds tile choose(total tiles) in the list of all experts' tiles of `tile_m` rows; a tile past the end has expert ==
// r.experts and no rows. Executed by a whole warp. All lanes get the result and the totals.
template <int tile_m, typename Choose>
__device__ __forceinline__ Share find_share(const Routing& r, const Choose& choose, RowsAndTiles& all) {
  OfLane own;
  all = {0, 0};
#pragma unroll 1
  for (int from = 0; from < r.experts; from += kAtOnce) own = next_experts<tile_m>(r, from, all);
  const int tile = choose(all.tiles);
  if (tile >= all.tiles) return {r.experts, all.rows, 0, tile - all.tiles};
  if (r.experts > kAtOnce) {
    RowsAndTiles seen = {0, 0};
#pragma unroll 1
    for (int from = 0; tile >= seen.tiles; from += kAtOnce) own = next_experts<tile_m>(r, from, seen);
  }
  Share share = {};
  bool owns = false;
  int before = own.tiles_before;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (tile >= before && tile < before + own.tiles[i]) {
      share = {own.first + i, own.begin_of(i), own.end[i] - own.begin_of(i), tile - before};
      owns = true;
    }
    before += own.tiles[i];
  }
  const int owner = __ffs(__ballot_sync(~0u, owns)) - 1;
  return {__shfl_sync(~0u, share.expert, owner), __shfl_sync(~0u, share.begin, owner),
          __shfl_sync(~0u, share.rows, owner), __shfl_sync(~0u, share.token_block, owner)};
}
// Finds tile `tile`. Tiles past those of experts cover the rows without an expert.
template <int tile_m>
__device__ __forceinline__ Share find_share(const Routing& r, int tile) {
  RowsAndTiles all;
  Share share = find_share<tile_m>(r, [&](int) { return tile; }, all);
  const int left = r.rows - all.rows;
  if (share.expert == r.experts && share.token_block < (left + tile_m - 1) / tile_m) share.rows = left;
  return share;
}

// Zero-fills the rows of y without an expert. CTA `cta` of `ctas` fills its share with `threads` threads.
__device__ __forceinline__ void write_rest(const Routing& r, int rows_of_experts, void* y, DType dtype, int n, int cta,
                                           int ctas, int threads) {
  const int64_t begin = static_cast<int64_t>(rows_of_experts) * n, end = static_cast<int64_t>(r.rows) * n;
  const int64_t step = static_cast<int64_t>(ctas) * threads;
  for (int64_t i = begin + static_cast<int64_t>(cta) * threads + threadIdx.x; i < end; i += step) {
    store_float(y, i, dtype, 0.0f);
  }
}

// Row of x for a row of y, clamped to the rows of x.
__device__ __forceinline__ int64_t x_row(const Routing& r, int64_t row) {
  if (r.row_index != nullptr) {
    row = r.wide_index ? static_cast<const int64_t*>(r.row_index)[row] : static_cast<const int32_t*>(r.row_index)[row];
  }
  return min(max(row, int64_t{0}), static_cast<int64_t>(r.x_rows - 1));
}

// Fills the CTA's table with the row of x of each token.
template <int tile_m>
__device__ __forceinline__ void fill_table(const Routing& r, const Share& share, uint32_t table) {
#pragma unroll 1
  for (int token = threadIdx.x; token < tile_m; token += blockDim.x) {
    const int of = share.token_block * tile_m + token;
    if (of >= share.rows) break;
    ptx::store_shared_4(table + token * 4, static_cast<uint32_t>(x_row(r, share.begin + of)));
  }
  __syncthreads();
}

// Zero-fills columns begin .. end - 1 of y for a tile of rows without an expert.
template <int tile_m>
__device__ __forceinline__ void write_zeros(const Share& share, void* y, DType dtype, int n, int begin, int end) {
  const int first = share.token_block * tile_m, rows = min(share.rows - first, tile_m), columns = end - begin;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int64_t row = share.begin + first + i / columns;
    store_float(y, row * n + begin + i % columns, dtype, 0.0f);
  }
}

// Multiplies by the row_scale of a row of y; `row` counts all rows.
__device__ __forceinline__ void scale_row(const Routing& r, int64_t row, float (&value)[4]) {
  if (r.row_scale == nullptr) return;
  const float factor = load_float(r.row_scale, row, r.row_scale_dtype);
#pragma unroll
  for (int i = 0; i < 4; ++i) value[i] *= factor;
}

template <typename T>
__device__ __forceinline__ const T* of_expert(const T* pointer, int expert, int64_t bytes) {
  if (pointer == nullptr) return nullptr;
  return reinterpret_cast<const T*>(reinterpret_cast<const uint8_t*>(pointer) + expert * bytes);
}
__device__ __forceinline__ const void* of_expert(const void* pointer, int expert, int64_t bytes) {
  return of_expert(static_cast<const uint8_t*>(pointer), expert, bytes);
}

}  // namespace qao::gemm
