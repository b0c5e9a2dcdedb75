// Kernel parameters and TMA descriptors.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "gemm/moe_routing.h"
#include "gemm/sm90_ws/kernel_traits.h"
#include "qao/gemm.h"

namespace qao::gemm::sm90_ws {

// TMA descriptors with boxes of one k-tile. Loads: x [token][part][k], W [row][1][k] or packed [row tile][tile of 64
// k][512 bytes], int4 scales [row tile][group][parameters]. Stores: y [token][1][n].
struct TensorMaps {
  CUtensorMap x, last_x, weight, scales, y;  // last_x: smaller boxes, for partial token tiles
};

constexpr int kOneGroup = 16;  // stands for the integer factor of a row's only group: see RowScaledOperand

// Tiles of y and K-tiles: for the tile scheduler and the loads.
struct TileParams {
  int64_t m;
  int n;
  int k_tiles, parts;            // parts: 3 if a float32 x is split into bfloat16 parts, else 1
  int row_blocks, token_blocks;  // tiles of y
  int whole_tiles;               // for tiles after these, clusters of kLastSplit CTAs split K
  int tile_rows;                 // rows of W per tile, at most the kernel's; with few rows, warpgroups idle
  int last_x_rows;               // tokens per box of last_x; the rest of the stage keeps old data
  int prefetch_tiles;            // k-tiles of W that a CTA prefetches before the PDL wait: at most 32
  int split_k;                   // CTAs of a cluster per tile of y
};

// What changes along K: groups of a packed W, or blocks of 128.
struct GroupParams {
  int groups;
  int groups_per_tile;        // 4, 2 or 1
  int fold_shift;             // groups_per_tile == 1: k-tile t belongs to group t >> fold_shift
  int group_bytes;            // packed: parameters of one group of 16 rows
  int scale_rows;             // fp4: groups and rows of the divisor
  bool has_zeros;             // group parameters include zero points
  bool subtracts_zeros;       // subtract zero points after the mainloop, using the sums of x in `columns`
  const void* scales;         // packed group parameters
  DType scale_dtype;          // dtype of group parameters
  float scale_factor;         // int4 with float16 x: keeps W out of subnormals
  const float* block_scales;  // Fold::kBlock: [row_blocks, groups]
  const float* columns;       // [m, groups], sums or block scales of x
  int column_tiles;           // k-tiles that have them: those of the first part of x; 0: none
  float factor;               // of the sums: undoes scale_factor and the operands' powers of two
};

// y = x_scale (GroupParams::factor row_scale sum - x_zero weight_sum) + bias. Null pointers: 1, 1, 0, 0, 0.
struct EpilogueParams {
  const float *row_scales, *x_scales;    // row_scales of NVFP4: the packed scales, with each row's divisor
  int row_scale_stride, x_scale_stride;  // 0: one scale for all
  DType row_scale_dtype;                 // for int4; else float32
  const int32_t* x_zeros;
  const float* weight_sums;
  const void* bias;
  void* y;
  bool copies_y;  // y is stored by TMA, 16 bits per value
  DType bias_dtype, y_dtype;
  float* partials;  // [slices, m, n] sums, which a second kernel adds: add_slices.cuh
  int slices;       // of K; 1: none
};

struct Params : TileParams, GroupParams, EpilogueParams {};
// m: rows of all experts, sorted by expert. Weights, scales and biases of experts are contiguous.
struct GroupedParams : Params {
  Routing routing;
};
// Several weights of one x. Params::n, row_blocks and y are of all of them, and of none.
struct MergedParams : Params {
  struct Weight {
    int first_block, n;  // row blocks of the weights before it, and its rows
    const void* bias;
    void* y;
  };
  Weight of[kMaxParts];  // after the last weight: a first_block that no tile reaches
};
struct MergedTensorMaps : TensorMaps {
  struct Weight {
    CUtensorMap weight, scales;
  };
  Weight of[kMaxParts];
};

}  // namespace qao::gemm::sm90_ws
