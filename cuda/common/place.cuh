// Tile scheduler of non-persistent kernels: rasterization and split-K.
#pragma once

#include <cstdint>

namespace qao {

// Tile of a CTA. Rasterization is in panels of 16 token tiles; inside a panel, the token tiles of one row tile are
// consecutive. Weights are then read from L2 within a panel, and x stays in L2 between row tiles.
struct Place {
  int row_block, token_block, split;
  int begin, end;  // k-tiles, counted across all parts of x
};
template <typename Tile, typename Params>
__device__ __forceinline__ Place place(const Params& p) {
  constexpr int kPanel = 16;
  const int row_blocks = (p.row_tiles + Tile::kRowTiles - 1) / Tile::kRowTiles;
  const int token_blocks = static_cast<int>((p.m + Tile::kM - 1) / Tile::kM);
  const int block = blockIdx.x, split = blockIdx.y, steps = p.parts * p.k_tiles;
  Place place{block, 0, split, 0, steps};
  if (token_blocks > 1) {
    const int panel = block / (kPanel * row_blocks), inside = block % (kPanel * row_blocks);
    const int width = min(kPanel, token_blocks - panel * kPanel);
    place.row_block = inside / width;
    place.token_block = panel * kPanel + inside % width;
  }
  if (p.split_k > 1) {  // steps * split / split_k, in 32 bits
    const int each = steps / p.split_k, left = steps % p.split_k;
    place.begin = each * split + left * split / p.split_k;
    place.end = each * (split + 1) + left * (split + 1) / p.split_k;
  }
  return place;
}

}  // namespace qao
