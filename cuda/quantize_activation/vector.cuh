// Kernel parameters of activation quantization, and stores of a thread's eight adjacent columns.
#pragma once

#include "common/quantize.cuh"
#include "qao/quantize.h"

namespace qao::quantize {

struct Params : Target {
  const void* x;            // [m, k]
  const void* other;        // [m, k]: up, the second half of x, or the residual; or null
  const void* norm_weight;  // [k] or null
  void* sum;                // [m, k] output: x + residual; or null
  void* y;                  // [m, k] output: the values; null: quantize them
  const void* row_scale;    // [m] of row_scale_dtype, factors of y; or null
  uint8_t* q;               // [m, q_stride]
  float* scales;
  int32_t* zeros;  // [m] or null
  float* sums;     // [m, groups] or null
  float* maxima;   // [parts]; kTensor, dynamic
  int64_t x_stride, other_stride, q_stride;
  int64_t m;
  int vectors;                     // per row of q, including padding
  int tiles;                       // tiles of a row in one CTA, processed in sequence
  int slices;                      // slices of a row in separate CTAs
  int parts;                       // parts of x with partial maxima
  int group, group_shift, groups;  // columns per sum; group 0: the whole row
  DType norm_weight_dtype, row_scale_dtype;
  bool aligned;    // 16-byte accesses of all inputs and float outputs, for Packed::load and store
  bool q_aligned;  // 8-byte stores
  bool static_scale, int4_tiles;
  float eps;
  Gate gate;
  int rotation;  // kHadamard
  float factor;  // hadamard_factor(rotation)
};

// Multiplies by the Hadamard matrix: a lane holds eight columns, Params::rotation / 8 adjacent lanes a block. Executed
// by whole warps.
__device__ __forceinline__ void rotate(const Params& p, float (&value)[kVector]) {
#pragma unroll
  for (int step = 1; step < kVector; step *= 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if ((i & step) != 0) continue;
      const float low = value[i], high = value[i + step];
      value[i] = low + high, value[i + step] = low - high;
    }
  }
#pragma unroll 1
  for (int lanes = 1; kVector * lanes < p.rotation; lanes *= 2) {
    const bool is_high = (threadIdx.x & lanes) != 0;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float other = __shfl_xor_sync(~0u, value[i], lanes);
      value[i] = other + (is_high ? -value[i] : value[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) value[i] *= p.factor;
}

template <bool kAligned>
__device__ __forceinline__ void store_vector(const Params& p, uint8_t* row, int column, uint2 word) {
  if (kAligned) {
    if (column < p.q_stride) *reinterpret_cast<uint2*>(row + column) = word;
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (column + i < p.q_stride) row[column + i] = static_cast<uint8_t>((i < 4 ? word.x : word.y) >> (8 * (i % 4)));
    }
  }
}

}  // namespace qao::quantize
