// The kernels as launch_sm90.cu sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "mm/routing.h"
#include "mm/wgmma/tile.h"
#include "qao/mm.h"

namespace qao::mm::wgmma {

// What the copy engine reads, in boxes of one K-tile: x [token][part][k], W [row][1][k] or packed
// [row tile][tile of 64 k][512 bytes], int4 scales [row tile][group][parameters]. What it writes: y [token][1][n].
struct TensorMaps {
  CUtensorMap x, last_x, weight, scales, y;  // last_x: smaller boxes, for tiles in which tokens end
};

constexpr int kOneGroup = 16;  // what stands for the whole number of a row's only group: see RowScaledOperand

struct Params {
  int64_t m;
  int n;
  int k_tiles, parts;            // parts: 3 when x is a float32 split into bfloat16 parts, else 1
  int row_blocks, token_blocks;  // tiles of y
  int whole_tiles;               // clusters of kLastSplit CTAs split K of the tiles that come after them
  int tile_rows;                 // rows of W in a tile, at most the kernel's; with few of them warpgroups idle
  int last_x_rows;               // tokens that a copy of x brings where they end; the rest keeps old data
  int prefetch_tiles;            // K-tiles of W that a CTA asks for before it waits for the kernel before: at most 32
  int split_k;                   // CTAs of a cluster that share a tile of y
  int groups;                    // along K: int4 groups, or blocks of 128
  int groups_per_tile;           // 4, 2 or 1
  int fold_shift;                // groups_per_tile == 1: K-tile t belongs to group t >> fold_shift
  int group_bytes;               // int4 parameters of one group of 16 rows
  int scale_rows;                // fp4: groups and parts of the divisor
  bool has_zeros;                // they include zero points
  bool subtracts_zeros;          // after the walk over K, from `columns`, the sums of x
  const void* scales;            // the parameters themselves
  DType scale_dtype;             // of int4 parameters
  float scale_factor;            // int4 beside a float16 x: keeps W out of its subnormals; `factor` takes it off again
  const float* block_scales;     // Fold::kBlock: [row_blocks, groups]
  const float* columns;          // [m, groups], sums or block scales of x
  int column_tiles;              // K-tiles that have them: of the first part of x; 0: none
  // y = x_scale (factor row_scale sum - x_zero weight_sum) + bias; null pointers stand for 1, 1, 0, 0, 0.
  float factor;
  const float *row_scales, *x_scales;    // row_scales of NVFP4: the packed scales, which hold each row's divisor
  int row_scale_stride, x_scale_stride;  // 0: one for all
  DType row_scale_dtype;                 // of int4; else float32
  const int32_t* x_zeros;
  const float* weight_sums;
  const void* bias;
  void* y;
  bool copies_y;  // the copy engine can store it, 16 bits a value
  DType bias_dtype, y_dtype;
};
// m: rows of all experts, sorted by expert. The weights, scales and biases of experts follow each other.
struct GroupedParams : Params {
  Routing routing;
};

}  // namespace qao::mm::wgmma
