// Kernel parameters: one block for all operand formats.
#pragma once

#include <cstdint>

#include "gemm/sm80_mma/tile.h"
#include "qao/types.h"

namespace qao::gemm::sm80_mma {

enum class Operands : int;  // operands.h

// Epilogue of a float32 sum over all of K: y = sum * scale of x * scale of W - zero point + bias.
struct Epilogue {
  float* partials;        // [split_k, m, n] for sm80_mma_reduce; null: the kernel writes y
  bool whole_sums;        // partial sums and sums of slices are int32
  void* y;                // [m, n]
  const float* x_scales;  // null: 1, or computed by a kernel that quantizes x
  int x_scale_stride;     // 1: per token; 0: one for all
  const float* scales;    // per row of W; null: 1, or applied along K
  int scale_stride;
  const int32_t* x_zeros;    // [m]; null: no zero points, or computed by a kernel that quantizes x
  const float* weight_sums;  // [n]; null: x has no zero points
  const void* bias;          // [n] or null
  int64_t m;
  int n;
  DType bias_dtype, y_dtype;
};

struct Params {
  const uint8_t* x;       // [m, parts * part_stride]; 8 bits with an int4 weight: quantize::Order::kInt4Tiles
  int64_t x_stride;       // bytes
  const uint8_t* weight;  // [n, k], or packed int4 or fp4
  int64_t m;
  int n, k;
  int x_columns;           // columns in memory: k, or rounded up to 64 for Order::kInt4Tiles
  int row_tiles, k_tiles;  // of the whole weight: of 16 rows, of OperandBytes::columns()
  int parts;               // 3 if x is a float32 split into bfloat16 parts, side by side; else 1
  int64_t part_stride;     // bytes
  bool x_aligned, weight_aligned;
  int split_k;
  int run, more_runs;  // n-tiles per CTA, the first `more_runs` have one more; 0: CTAs compute output tiles
  int sums_at;         // offset of the partial sums in shared memory; 0: they overlay the ring
  bool next_early;     // launch the dependent kernel early (PDL)
  int sum_places;      // buffers of partial sums: 1, or 2 in alternation
  int prefetch_rows, prefetch_bytes;  // of W (int4: of 16 rows each), for the L2 prefetch; a multiple of 16

  // int4 and fp4 weights.
  const uint8_t* group_scales;  // packed scales and zero points
  const float* x_sums;          // [m, groups]; float x: only of a float32 x, and with zero points
  int groups;                   // rows of scales: NVFP4 has more than groups
  int tile_groups;              // groups per K-tile: 4, 2 or 1
  int group_shift;              // tile_groups == 1: K-tile t lies in group t >> group_shift
  int group_bytes;              // scales and zeros of one group of 16 rows
  int scale_chunk_shift;        // log2 of the 16-byte chunks of scales and zeros per K-tile and 16 rows
  DType scale_dtype;
  bool has_zeros;

  // fp8 weights with 128 x 128 block scales: a K-tile is one block. Otherwise null.
  const float* block_scales;    // [ceil(n / 128), k_tiles]
  const float* x_block_scales;  // x is fp8: [m, k_tiles]

  // For kernels that quantize x, which is then [m, k] of x_dtype with rows aligned to 16 bytes.
  ResidentX resident;
  int resident_at;      // offset in shared memory
  int float_row_bytes;  // in shared memory
  DType x_dtype;
  Scaling x_scaling;
  const float* given_scale;  // kTensor: static scale; null: computed from x

  Epilogue epilogue;
};

using Kernel = void (*)(Params);

// Float x with 4-bit W: the kernel of a row of weight_only_tiles.inc. `zeros`: it applies zero points.
Kernel w4a16_kernel_of(int row, bool half, bool zeros);
Kernel wfp4a16_kernel_of(int row, bool half, bool nvfp4);

// Rows of tiles_sm90.inc; rows of tiles.inc follow. Config::index counts through both.
constexpr int kTilesSm90 = 0
#define QAO_TILE(...) +1
#include "gemm/sm80_mma/tiles_sm90.inc"
#undef QAO_TILE
    ;

}  // namespace qao::gemm::sm80_mma
