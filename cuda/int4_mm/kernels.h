// The mma.sync kernels as launch.cu sees them: one parameter block, one table a body.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "int4_mm/decode.h"
#include "int4_mm/few.h"
#include "int4_mm/shared.h"
#include "qao/types.h"

namespace qao::int4_mm {

struct Params {
  const void* x;  // [m, parts * part_stride] 16-bit
  int64_t x_stride;
  const uint8_t* weight;
  const uint8_t* scales;
  const void* bias;  // null if there is none or another kernel adds it
  void* y;           // [splits, m, n] of y_dtype
  int64_t m;
  int n, k;
  int row_tiles, k_tiles;  // of the whole weight
  int parts;               // 3 when x is a float32 split into bfloat16 parts, laid side by side; else 1
  int part_stride;
  int groups;
  int group_shift;        // group of K-tile t is t >> group_shift; -1: two groups of 32 per tile
  int group_bytes;        // parameters of one group of a row tile
  int scale_chunk_shift;  // log2 of the 16-byte chunks of parameters that a K-tile needs per row tile
  bool x_aligned;
  DType scale_dtype, bias_dtype, y_dtype;
  int split_k;
  // Of a normed problem (few_x.cuh): x + residual goes through RMSNorm. All null in others.
  const void* residual;  // [m, k], or null
  int64_t residual_stride;
  const void* norm_weight;  // [k], or null
  void* sum;                // [m, k] x + residual
  float eps;
};

// Kernels of row `config` of configs.inc; `zeros`: it applies zero points.
using Sm80Kernel = void (*)(Params);
Sm80Kernel sm80_kernel(int config, bool half, bool zeros);

// Those for few tokens. `groups` of a K-step: for decode only those that are not columns of their own; `half_x`: x is
// float16, not bfloat16.
using DecodeKernel = void (*)(Params, DecodeParams);
DecodeKernel decode_kernel(int config, int groups, bool has_zeros, DType scale_dtype);

using FewKernel = void (*)(Params, FewParams);
FewKernel few_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype);

// `half`: the parameters are float16, not bfloat16. The map is that of x.
using SharedKernel = void (*)(Params, SharedParams, CUtensorMap);
SharedKernel shared_kernel(int config, bool half_x, bool zeros, bool half);

}  // namespace qao::int4_mm
