// Tile scheduler: the tiles of y of a persistent CTA, split-K and the tiles of experts included.
#pragma once

#include "common/ptx.cuh"
#include "gemm/sm90_ws/kernel_policy.cuh"
#include "gemm/sm90_ws/moe_tile_table.cuh"
#include "gemm/sm90_ws/params.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

// Tile of y, and the k-tiles of this CTA, counted across all parts of x. Rasterization is in panels of 2048 tokens;
// inside a panel, the token tiles of one row tile are consecutive. Weights are then read from L2 within a panel, and x
// stays in L2 between row tiles.
struct Place {
  int row_block, token_block, begin, end;
  int split_k;      // CTAs of a cluster that split K
  ExpertRows rows;  // grouped: rows of the tile's expert
  int weight;       // merged: index of the weight, to which row_block belongs
  int slice;        // of K; a second kernel adds the sums of all
};
template <typename K>
__device__ __forceinline__ int64_t first_token(const Place& at) {
  return (K::kGrouped ? at.rows.begin : 0) + static_cast<int64_t>(at.token_block) * K::kTokens;
}
template <typename K>
__device__ __forceinline__ int64_t last_token(const Params& p, const Place& at) {  // exclusive
  return K::kGrouped ? at.rows.end : p.m;
}
// Rows of a weight in a tile.
template <typename K>
__device__ __forceinline__ int rows_in_tile(const Params& p) {
  return K::kGated ? p.tile_rows / 2 : p.tile_rows;
}
// Rows of W and y of the GEMM that a tile belongs to.
template <typename K>
__device__ __forceinline__ int rows_of(const Params& p, int weight) {
  return K::kMerged ? static_cast<const MergedParams&>(p).of[weight].n : p.n;
}
template <typename K>
__device__ __forceinline__ void* y_of(const Params& p, int weight) {
  return K::kMerged ? static_cast<const MergedParams&>(p).of[weight].y : p.y;
}
// Offset of an expert in an array with `size` elements per expert.
template <typename K>
__device__ __forceinline__ int of_expert(const Place& at, int size) {
  return K::kGrouped ? at.rows.expert * size : 0;
}
// a / b without a division in the common cases. Division is slow, and latency before a CTA's first load adds to every
// call.
__device__ __forceinline__ int quotient(int a, int b) { return a < b ? 0 : b == 1 ? a : a / b; }
// Position of tile `tile` in the panels of one GEMM.
template <typename K>
__device__ __forceinline__ void place_in_panel(const Params& p, int tile, int token_blocks, Place* at) {
  const int panel = quotient(tile, K::kPanel * p.row_blocks), inside = tile - panel * K::kPanel * p.row_blocks;
  const int width = min(K::kPanel, token_blocks - panel * K::kPanel);
  at->row_block = quotient(inside, width);
  at->token_block = panel * K::kPanel + inside - at->row_block * width;
}
// Tile of scheduler step `turn`. Past Params::whole_tiles, each tile has two steps, one per CTA of the pair that splits
// K.
template <typename K>
__device__ __forceinline__ Place place(const Params& p, uint32_t shared, int turn) {
  const int steps = p.parts * p.k_tiles;
  Place at{0, 0, 0, steps, 1, {}, 0, 0};
  if constexpr (K::kGrouped) {
    const Routing& r = static_cast<const GroupedParams&>(p).routing;
    const ExpertTiles of = find_expert(r, shared + K::kStage.table, turn, p.row_blocks);
    place_in_panel<K>(p, turn - of.first_tile * p.row_blocks, of.tiles, &at);
    at.rows = of.rows;
  } else {
    if constexpr (K::kSlices) {
      const int tile = quotient(turn, p.slices);
      at.slice = turn - tile * p.slices;
      turn = tile;
    }
    const bool whole = turn < p.whole_tiles;
    place_in_panel<K>(p, whole ? turn : p.whole_tiles + (turn - p.whole_tiles) / kLastSplit, p.token_blocks, &at);
    at.split_k = whole ? p.split_k : kLastSplit;
    const int part = at.split_k > 1 ? ptx::cluster_rank() : 0;
    at.begin = quotient(steps * part, at.split_k), at.end = quotient(steps * (part + 1), at.split_k);
    if (K::kSlices && p.slices > 1) {
      at.begin = quotient(steps * at.slice, p.slices), at.end = quotient(steps * (at.slice + 1), p.slices);
    }
  }
  if constexpr (K::kMerged && !K::kGated) {
    const MergedParams& merged = static_cast<const MergedParams&>(p);
#pragma unroll
    for (int i = 1; i < kMaxParts; ++i) at.weight += at.row_block >= merged.of[i].first_block;
    at.row_block -= merged.of[at.weight].first_block;
  }
  if constexpr (K::kPingPong) at.row_block = at.row_block * kPingPongCluster + ptx::cluster_rank();
  return at;
}
// First scheduler step of this CTA.
template <typename K>
__device__ __forceinline__ int first_turn(const Params& p) {
  return K::kPingPong || p.split_k > 1 ? ptx::cluster_index() : static_cast<int>(blockIdx.x);
}
template <typename K>
__device__ __forceinline__ int turn_step(const Params& p) {
  return K::kPingPong || p.split_k > 1 ? ptx::cluster_count() : static_cast<int>(gridDim.x);
}
template <typename K>
__device__ __forceinline__ int turns(const Params& p, uint32_t shared) {
  if constexpr (K::kGrouped) {
    return all_of_experts(static_cast<const GroupedParams&>(p).routing, shared + K::kStage.table).tiles * p.row_blocks;
  }
  const int tiles = p.whole_tiles + (p.row_blocks * p.token_blocks - p.whole_tiles) * kLastSplit;
  return K::kSlices ? tiles * p.slices : tiles;
}
// `shared`: shared-memory address of the CTA.
template <typename K, typename Work>
__device__ __forceinline__ void for_each_tile(const Params& p, uint32_t shared, const Work& work) {
  const int end = turns<K>(p, shared), step = turn_step<K>(p);
  for (int turn = first_turn<K>(p); turn < end; turn += step) work(place<K>(p, shared, turn));
}
// First row of W of a tile, or first row tile of a packed W.
template <typename K>
__device__ __forceinline__ int weight_row(const Params& p, const Place& at) {
  if constexpr (K::kPacked) {
    const int row_tiles = (p.n + int4::kTileN - 1) / int4::kTileN;
    return of_expert<K>(at, row_tiles) + at.row_block * (rows_in_tile<K>(p) / int4::kTileN);
  }
  return of_expert<K>(at, p.n) + at.row_block * p.tile_rows;
}

}  // namespace qao::gemm::sm90_ws
