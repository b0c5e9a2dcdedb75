// The kernels as launch.cu sees them: one parameter block for all operands.
#pragma once

#include <cstdint>

#include "mm/mma_sync/tile.h"
#include "qao/types.h"

namespace qao::mm::mma_sync {

enum class Operands : int;  // operands.h

// What becomes of a float32 sum over all of K: y = sum * scale of x * scale of W - zero point + bias.
struct Epilogue {
  float* partials;        // [split_k, m, n]: plain sums, to be finished by finish_kernel; null: y is written at once
  bool whole_sums;        // these, and sums of slices, are int32
  void* y;                // [m, n]
  const float* x_scales;  // null: 1, or made by a kernel that quantises x
  int x_scale_stride;     // 1: one a token; 0: one for all
  const float* scales;    // of the rows of W; null: 1, or applied along K
  int scale_stride;
  const int32_t* x_zeros;    // [m]; null: none, or made by a kernel that quantises x
  const float* weight_sums;  // [n]; null: x has no zero points
  const void* bias;          // [n] or null
  int64_t m;
  int n;
  DType bias_dtype, y_dtype;
};

struct Params {
  const uint8_t* x;       // [m, parts * part_stride]; an int4 weight: quantize::Order::kInt4Tiles
  int64_t x_stride;       // bytes
  const uint8_t* weight;  // [n, k], or packed int4
  int64_t m;
  int n, k;
  int x_columns;           // that exist in memory: k, or rounded up to 64 with an int4 weight
  int row_tiles, k_tiles;  // of the whole weight: 16 rows, kTileK columns
  int parts;               // 3 when x is a float32 split into bfloat16 parts, laid side by side; else 1
  int64_t part_stride;     // bytes
  bool x_aligned, weight_aligned;
  int split_k;
  int run, more_runs;  // row tiles of a CTA, the first `more_runs` have one more; 0: CTAs are tiles
  int sums_at;         // offset in shared memory of the epilogue's sums; 0: they take the place of the ring
  bool next_early;     // lets the next kernel start
  int sum_places;      // 1 or 2, used by turns
  int prefetch_rows, prefetch_bytes;  // of W (int4: of 16 rows each), for the L2 cache; a multiple of 16

  // int4 weights.
  const uint8_t* group_scales;  // packed scales and zero points
  const float* x_sums;          // [m, groups]
  int groups;
  int tile_groups;        // groups of one K-tile: 4, 2 or 1
  int group_shift;        // tile_groups == 1: the group of K-tile t is t >> group_shift
  int group_bytes;        // parameters of one group of 16 rows
  int scale_chunk_shift;  // log2 of the 16-byte chunks of parameters that a K-tile needs per 16 rows
  DType scale_dtype;
  bool has_zeros;

  // fp8 weights in blocks of 128 x 128: a K-tile is one block; else null.
  const float* block_scales;    // [ceil(n / 128), k_tiles]
  const float* x_block_scales;  // x is fp8: [m, k_tiles]

  // Kernels that quantise x: it is [m, k] of x_dtype then, rows aligned to 16 bytes.
  ResidentX resident;
  int resident_at;      // offset in shared memory
  int float_row_bytes;  // in shared memory
  DType x_dtype;
  Scaling x_scaling;
  const float* given_scale;  // kTensor: known beforehand; null: from x

  Epilogue epilogue;
};

using Kernel = void (*)(Params);

// Rows of tiles_sm90.inc, and after them of tiles.inc: Config::index counts through both.
constexpr int kTilesSm90 = 0
#define QAO_TILE(...) +1
#include "mm/mma_sync/tiles_sm90.inc"
#undef QAO_TILE
    ;
// Kernels of a row of one of them. kernel_sm89_of(): of tiles.inc, x in fp8 alone, on fp8 tensor cores.
Kernel kernel_sm90_of(int row, Operands operands);
Kernel kernel_of(int row, Operands operands);
Kernel kernel_sm89_of(int row, Operands operands);

}  // namespace qao::mm::mma_sync
