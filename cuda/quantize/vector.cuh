// What the quantising kernels are told, and how they store eight neighbouring columns, the unit of work of one thread.
#pragma once

#include "common/quantize.cuh"
#include "qao/quantize.h"

namespace qao::quantize {

struct Params : Target {
  const void* x;            // [m, k]
  const void* other;        // [m, k] up, the second half of x, or the residual or null
  const void* norm_weight;  // [k] or null
  void* sum;                // [m, k] x + residual; or null
  void* y;                  // [m, k] the values themselves; null: they are quantised
  const void* row_scale;    // [m] of row_scale_dtype, factors of y; or null
  uint8_t* q;               // [m, q_stride]
  float* scales;
  int32_t* zeros;  // [m] or null
  float* sums;     // [m, groups] or null
  float* maxima;   // [parts]; kTensor, dynamic
  int64_t x_stride, other_stride, q_stride;
  int64_t m;
  int vectors;                     // of a row of q, padding included
  int tiles;                       // parts of a row that a CTA treats one after the other
  int slices;                      // parts of a row that CTAs of their own treat
  int parts;                       // of x that have a maximum of their own
  int group, group_shift, groups;  // of sums; group 0: the whole row
  DType norm_weight_dtype, row_scale_dtype;
  bool aligned;    // all inputs and float outputs, for Packed::load and store
  bool q_aligned;  // for stores of eight bytes
  bool static_scale, int4_tiles;
  float eps;
  Gate gate;
  int rotation;  // kHadamard
  float factor;  // hadamard_factor(rotation)
};

// Eight columns of each lane times the Hadamard matrix, of which Params::rotation / 8 neighbouring lanes have a block.
// All lanes of a warp take part.
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
