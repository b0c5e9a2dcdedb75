// Shared-memory table of the first row and tile of each expert, for persistent CTAs of grouped GEMMs.
#pragma once

#include "common/ptx.cuh"
#include "gemm/moe_routing.cuh"
#include "gemm/sm90_ws/kernel_traits.h"

namespace qao::gemm::sm90_ws {

// Rows [begin, end) of y of one expert.
struct ExpertRows {
  int expert, begin, end;
};
// The expert's row tiles, counted across all experts.
struct ExpertTiles {
  ExpertRows rows;
  int first_tile, tiles;
};

// Fills the table, executed by one warp: tiles and rows before each expert, and the totals as last entry.
template <int tile_m>
__device__ __forceinline__ void make_table(const Routing& r, uint32_t table) {
  const auto store = [&](int expert, int tiles, int rows) {
    ptx::store_shared_8(table + expert * 8, {static_cast<uint32_t>(tiles), static_cast<uint32_t>(rows)});
  };
  const RowsAndTiles all =
      for_each_expert<tile_m>(r, [&](int expert, int begin, int, int first_tile) { store(expert, first_tile, begin); });
  if (threadIdx.x % 32 == 0) store(r.experts, all.tiles, all.rows);
}

__device__ __forceinline__ RowsAndTiles all_of_experts(const Routing& r, uint32_t table) {
  const uint2 last = ptx::load_shared_8(table + r.experts * 8);
  return {static_cast<int>(last.y), static_cast<int>(last.x)};
}

// Finds the expert of tile `turn`, if every row tile has `row_blocks` tiles: the last expert that begins at or before
// it. Executed by a whole warp.
__device__ __forceinline__ ExpertTiles find_expert(const Routing& r, uint32_t table, int turn, int row_blocks) {
  int begun = 0;
  for (int e = threadIdx.x % 32; e < r.experts; e += 32) {
    begun += ptx::load_shared_int(table + e * 8) * row_blocks <= turn;
  }
  const int expert = static_cast<int>(__reduce_add_sync(0xFFFFFFFFu, static_cast<unsigned>(begun))) - 1;
  const uint2 first = ptx::load_shared_8(table + expert * 8), next = ptx::load_shared_8(table + expert * 8 + 8);
  const int tiles = static_cast<int>(next.x - first.x);
  return {{expert, static_cast<int>(first.y), static_cast<int>(next.y)}, static_cast<int>(first.x), tiles};
}

}  // namespace qao::gemm::sm90_ws
