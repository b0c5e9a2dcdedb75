// The Hopper kernels as launch.cu sees them.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "qao/int4_mm.h"

namespace qao::int4_mm::sm90 {

// What the copy engine reads, in boxes of one K-tile: x [token][part][k], W [row tile][tile of 64 k][512 bytes], scales
// [row tile][group][parameters].
struct TensorMaps {
  CUtensorMap x, weight, scales;
};

struct Params {
  int64_t m;
  int n;
  int k_tiles, parts;            // parts: 3 when x is a float32 split into bfloat16 parts, else 1
  int row_blocks, token_blocks;  // tiles of y
  int split_k;                   // CTAs of a cluster that share a tile of y
  int share;                     // CTAs of a cluster, for neighbouring row tiles, that fetch x together: 1 or 2
  int groups;                    // along K
  int groups_per_tile;           // 2 or 1
  int group_shift;               // groups_per_tile == 1: K-tile t belongs to group t >> group_shift
  int group_bytes;               // parameters of one group of 16 rows
  bool has_zeros;                // they include zero points
  DType scale_dtype;
  float scale_factor;  // keeps W out of the subnormals of float16; `factor` takes it off again
  float factor;
  const float* x_sums;  // [m, groups] sums of a float32 x for the zero points
  int sum_tiles;        // K-tiles that have them: of the first part of x; 0: none
  const void* bias;     // [n] or null
  void* y;              // [m, n]
  DType bias_dtype, y_dtype;
};

// x as the tensor cores read it: of 16 bits, a float32 in bfloat16 parts side by side.
struct X {
  const void* data;
  int64_t stride;  // elements
  int parts;
  int64_t part_stride;  // elements
  const float* sums;    // Params::x_sums, or null
};

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);

}  // namespace qao::int4_mm::sm90
