// Kernel parameters of float x with int4 or fp4 weights, shared by sm90_skinny/ and sm80_mma/.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/integers.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "layout/int4.h"

namespace qao::gemm {

// A fused RMSNorm(x + residual) (sm90_skinny/prologue_rmsnorm.cuh). Null unless Problem::normed.
struct NormParams {
  const void* residual;  // [m, k], or null
  int64_t residual_stride;
  const void* weight;  // [k], or null
  void* sum;           // [m, k] output: x + residual
  float eps;
};

struct Int4Params {
  const void* x;  // [m, parts * part_stride] 16-bit
  int64_t x_stride;
  const uint8_t* weight;
  const uint8_t* scales;
  const void* bias;  // null if there is no bias or a second kernel adds it
  void* y;           // [splits, m, n] of y_dtype
  int64_t m;
  int n, k;
  int row_tiles, k_tiles;  // of the full weight
  int parts;               // 3 if a float32 x is split into bfloat16 parts, stored side by side; else 1
  int part_stride;
  int groups;             // rows of scales
  int group_shift;        // group of k-tile t is t >> group_shift; -1: two groups of 32 per tile
  int group_bytes;        // bytes of parameters per group and row tile
  int scale_chunk_shift;  // log2 of the 16-byte chunks of parameters per k-tile and row tile
  bool x_aligned;
  bool fp4, divided;  // weights are fp4 codes; the last rows of scales hold the divisor (NVFP4)
  DType scale_dtype, bias_dtype, y_dtype;
  int split_k;
  NormParams norm;
};

inline int group_shift_of(int64_t group_size, int64_t k) {
  if (group_size == 32 && k > 32) return -1;
  int shift = 0;
  while (shift < 30 && (int64_t{int4::kTileK} << shift) < std::min(group_size, k)) ++shift;
  return group_size >= k ? 30 : shift;
}

inline Int4Params int4_params(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x) {
  Int4Params p{};
  p.x = x.data;
  p.x_stride = x.stride;
  p.weight = static_cast<const uint8_t*>(arguments.weight);
  p.scales = static_cast<const uint8_t*>(arguments.scales);
  p.bias = arguments.bias;
  p.y = arguments.y;
  p.m = problem.m;
  p.n = static_cast<int>(problem.n);
  p.k = static_cast<int>(problem.k);
  p.row_tiles = static_cast<int>(int4::tiles_n(problem.n));
  p.k_tiles = static_cast<int>(int4::tiles_k(problem.k));
  p.parts = x.parts;
  p.part_stride = static_cast<int>(x.part_stride);
  p.groups = static_cast<int>(scale_rows(problem));
  p.fp4 = is_float_fp4(problem), p.divided = p.fp4 && problem.group_size == fp4::kNvGroup;
  p.group_shift = group_shift_of(problem.group_size, problem.k);
  p.group_bytes = group_bytes(problem);
  p.scale_chunk_shift = log2_of(p.group_bytes / 16) + (p.group_shift < 0 ? 1 : 0);
  p.x_aligned = x.aligned;
  p.scale_dtype = problem.scale_dtype;
  p.bias_dtype = problem.bias_dtype;
  p.y_dtype = problem.x_dtype;
  p.split_k = plan.split_k;
  p.norm = {arguments.residual, arguments.residual_stride, arguments.norm_weight, arguments.sum, arguments.eps};
  return p;
}

}  // namespace qao::gemm
