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

struct RowsAndTiles {
  int rows, tiles;
};

// Calls use(expert, begin, end, first_tile) for the experts of this lane, whose rows of y are [begin, end), with the
// number of tiles of `tile_m` rows before them, and returns the numbers of all. A warp computes it as one. A lane has
// neighbouring experts: it needs the end of those before it, a maximum since offsets may be anything, and their number
// of tiles. It reads a few ends at once, and keeps them where it has no more.
template <int tile_m, typename Use>
__device__ __forceinline__ RowsAndTiles for_each_expert(const Routing& r, const Use& use) {
  constexpr int kHeld = 4;
  const int lane = threadIdx.x % 32, each = (r.experts + 31) / 32;
  const int first = min(lane * each, r.experts), last = min(first + each, r.experts);
  int held[kHeld], held_from = -1;
  const auto for_each = [&](const auto& of) {
#pragma unroll 1
    for (int from = first; from < last; from += kHeld) {
      if (from != held_from) {
#pragma unroll
        for (int i = 0; i < kHeld; ++i) held[i] = from + i < last ? min(r.ends[from + i], r.limit) : 0;
        held_from = from;
      }
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (from + i < last) of(from + i, held[i]);
      }
    }
  };
  int end = 0;
  for_each([&](int, int own) { end = max(end, own); });
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, end, distance);
    if (lane >= distance) end = max(end, other);
  }
  const int all_rows = __shfl_sync(~0u, end, 31);
  int begin = __shfl_up_sync(~0u, end, 1);
  if (lane == 0) begin = 0;

  int own_tiles = 0, from = begin;
  for_each([&](int, int own) {
    const int to = max(from, own);
    own_tiles += (to - from + tile_m - 1) / tile_m;
    from = to;
  });
  int tiles = own_tiles;  // up to this lane's last expert
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const int other = __shfl_up_sync(~0u, tiles, distance);
    if (lane >= distance) tiles += other;
  }
  int before = tiles - own_tiles;
  from = begin;
  for_each([&](int expert, int own) {
    const int to = max(from, own);
    use(expert, from, to, before);
    before += (to - from + tile_m - 1) / tile_m, from = to;
  });
  return {all_rows, __shfl_sync(~0u, tiles, 31)};
}

// Tile `tile` of the walk over all experts' tiles of `tile_m` rows, and then nobody's. A warp computes it as one; all
// lanes get the result.
template <int tile_m>
__device__ __forceinline__ Share find_share(const Routing& r, int tile) {
  Share share = {};
  bool owns = false;
  const RowsAndTiles all = for_each_expert<tile_m>(r, [&](int expert, int begin, int end, int first_tile) {
    if (tile < first_tile || tile >= first_tile + (end - begin + tile_m - 1) / tile_m) return;
    share = {expert, begin, end - begin, tile - first_tile};
    owns = true;
  });
  if (tile >= all.tiles) {
    const int block = tile - all.tiles;
    return {r.experts, all.rows, block < (r.rows - all.rows + tile_m - 1) / tile_m ? r.rows - all.rows : 0, block};
  }
  const int owner = __ffs(__ballot_sync(~0u, owns)) - 1;
  return {__shfl_sync(~0u, share.expert, owner), __shfl_sync(~0u, share.begin, owner),
          __shfl_sync(~0u, share.rows, owner), __shfl_sync(~0u, share.token_block, owner)};
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
