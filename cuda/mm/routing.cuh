// Which expert's rows a CTA of a grouped product has. It finds them itself: nobody waits for the routing but the GPU.
#pragma once

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "mm/int4_params.h"
#include "mm/routing.h"

namespace qao::mm {

// Panels of 16 token tiles, inside a panel all of one row block together (common/place.cuh): tiles of one expert are
// neighbours and read its weights while they are in L2.
struct TileIndex {
  int row_block, tokens;
};
__device__ __forceinline__ TileIndex tile_of(const Routing& r) {
  constexpr int kPanel = 16;
  const int block = blockIdx.x, panel = block / (kPanel * r.row_blocks), inside = block % (kPanel * r.row_blocks);
  const int width = min(kPanel, r.token_tiles - panel * kPanel);
  return {inside / width, panel * kPanel + inside % width};
}

// Rows of an expert, or of nobody: expert == experts. rows == 0: the CTA has nothing to do.
struct Share {
  int expert, begin, rows;  // of y
  int token_block;          // of them: tile_m rows
};

// Brings the ends of experts and the first row numbers as far as L2 while the kernel before, whose they may be, still
// runs: what it writes to them counts there. The first warp, a line a lane.
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

// Of each lane, what those before it have together: `add` of their values, and of all lanes'.
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

// Four neighbouring experts of a lane: the rows of the first one end at end[0] and begin at `begin`, those of the next
// one begin there. Tiles of `tile_m` rows before them, and each one's.
constexpr int kOfLane = 4, kAtOnce = 32 * kOfLane;
struct OfLane {
  int first;  // expert
  int begin, end[kOfLane];
  int tiles_before, tiles[kOfLane];
  __device__ __forceinline__ int begin_of(int i) const { return i > 0 ? end[i - 1] : begin; }
};
// A warp computes it as one, of the experts from `from` on; `all` is of those before, and then of these too. An expert
// begins where the largest end before it is, since ends may be anything; past the last one there are no rows.
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

// Calls use(expert, begin, end, first_tile) for the experts of this lane, whose rows of y are [begin, end), with the
// number of tiles before them, and returns the numbers of all. A warp computes it as one.
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

// Tile choose(tiles of all) of the walk over all experts' tiles of `tile_m` rows; past the last one no expert's, and no
// rows. A warp computes it as one; all lanes get the result, and what all experts have.
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
// Tile `tile`, and past all experts' those of the rows that nobody has.
template <int tile_m>
__device__ __forceinline__ Share find_share(const Routing& r, int tile) {
  RowsAndTiles all;
  Share share = find_share<tile_m>(r, [&](int) { return tile; }, all);
  const int left = r.rows - all.rows;
  if (share.expert == r.experts && share.token_block < (left + tile_m - 1) / tile_m) share.rows = left;
  return share;
}

// Zeros for the rows of y that no expert has: the part of CTA `cta` of `ctas`, by `threads` threads.
__device__ __forceinline__ void write_rest(const Routing& r, int rows_of_experts, void* y, DType dtype, int n, int cta,
                                           int ctas, int threads) {
  const int64_t begin = static_cast<int64_t>(rows_of_experts) * n, end = static_cast<int64_t>(r.rows) * n;
  const int64_t step = static_cast<int64_t>(ctas) * threads;
  for (int64_t i = begin + static_cast<int64_t>(cta) * threads + threadIdx.x; i < end; i += step) {
    store_float(y, i, dtype, 0.0f);
  }
}

// The row of x for a row of y; numbers that are no row of x count as the nearest that is.
__device__ __forceinline__ int64_t x_row(const Routing& r, int64_t row) {
  if (r.row_index != nullptr) {
    row = r.wide_index ? static_cast<const int64_t*>(r.row_index)[row] : static_cast<const int32_t*>(r.row_index)[row];
  }
  return min(max(row, int64_t{0}), static_cast<int64_t>(r.x_rows - 1));
}

// Rows of x for the tokens of a CTA, into its table.
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

// Zeros for a tile of rows that no expert has: columns begin .. end - 1 of y.
template <int tile_m>
__device__ __forceinline__ void write_zeros(const Share& share, void* y, DType dtype, int n, int begin, int end) {
  const int first = share.token_block * tile_m, rows = min(share.rows - first, tile_m), columns = end - begin;
#pragma unroll 1
  for (int i = threadIdx.x; i < rows * columns; i += blockDim.x) {
    const int64_t row = share.begin + first + i / columns;
    store_float(y, row * n + begin + i % columns, dtype, 0.0f);
  }
}

// What a row of y is multiplied by; `row` counts all rows.
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

// With rows of y of one expert as its tokens.
__device__ __forceinline__ Int4Params params_of_expert(const Int4Params& p, const Routing& r, const Share& share) {
  Int4Params own = p;
  own.m = share.rows;
  own.weight = of_expert(p.weight, share.expert, r.weight_bytes);
  own.scales = of_expert(p.scales, share.expert, r.scales_bytes);
  own.bias = of_expert(p.bias, share.expert, r.bias_bytes);
  return own;
}

}  // namespace qao::mm
