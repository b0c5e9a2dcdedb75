// One scale per row: a CTA has a row, in registers between the search for its range and the rounding.
//
//   load, producer  ->  range (and RMSNorm's sum of squares) over the CTA  ->  round, store
//
// A row too long for that is a number of tiles; only the last one read stays, the others are read again (from L2).
#pragma once

#include <cfloat>

#include "quantize/reduce.cuh"
#include "quantize/vector.cuh"

namespace qao::quantize {

constexpr int kMaxThreads = 1024;

// kFast: Params::aligned. Otherwise elements are read one by one.
template <DType dtype, Producer producer, int kVectors, bool kFast>
class Row {
 public:
  __device__ __forceinline__ Row(const Params& p)
      : p_(p),
        x_(static_cast<const char*>(p.x) + blockIdx.x * p.x_stride * size_of(dtype)),
        up_(static_cast<const char*>(p.up) + blockIdx.x * p.up_stride * size_of(dtype)) {}

  __device__ __forceinline__ int column(int tile, int vector) const {
    return ((tile * kVectors + vector) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector;
  }

  // x; silu(x) * up; or x * norm_weight, whose x^2 are added to `squares` and whose `factor` comes later.
  __device__ __forceinline__ void load(int tile, float* squares) {
    Packed<dtype> x[kVectors], other[kVectors];
#pragma unroll
    for (int v = 0; v < kVectors; ++v) x[v].template load<kFast>(x_, column(tile, v), p_.k);
    if constexpr (producer == Producer::kSiluMul) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) other[v].template load<kFast>(up_, column(tile, v), p_.k);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      x[v].unpack(value[v]);
      float factor[kVector];
      if constexpr (producer == Producer::kRmsNorm) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) *squares += value[v][i] * value[v][i];
        if (p_.norm_weight == nullptr) continue;
        if constexpr (kFast) {
          if (v % 2 == 0) {  // two at a time: more would need more registers than there are
#pragma unroll
            for (int w = v; w < kVectors && w < v + 2; ++w) {
              other[w].template load<true, true>(p_.norm_weight, column(tile, w), p_.k);
            }
          }
          other[v].unpack(factor);
        } else {
#pragma unroll
          for (int i = 0; i < kVector; ++i) {
            const int k = column(tile, v) + i;
            factor[i] = k < p_.k ? load_float(p_.norm_weight, k, p_.norm_weight_dtype) : 0;
          }
        }
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[v][i] *= factor[i];
      } else if constexpr (producer == Producer::kSiluMul) {
        other[v].unpack(factor);
#pragma unroll
        for (int i = 0; i < kVector; ++i) value[v][i] = __fdividef(value[v][i], 1 + expf(-value[v][i])) * factor[i];
      }
    }
  }

  // The same sum where float32 does not hold it.
  __device__ __forceinline__ double squares_in_float64() const {
    double squares = 0;
    for (int k = threadIdx.x; k < p_.k; k += blockDim.x) {
      const double x = load_float(x_, k, dtype);
      squares += x * x;
    }
    return squares;
  }

  float value[kVectors][kVector];

 private:
  const Params& p_;
  const char *x_, *up_;
};

// Writes scales and zero point of the row.
__device__ __forceinline__ Rounding finish_range(const Params& p, const Range& range) {
  float scale;
  const Rounding rounding = rounding_of(range, p, &scale);
  if (threadIdx.x == 0) {
    p.scales[blockIdx.x] = scale;
    if (p.zeros != nullptr) p.zeros[blockIdx.x] = static_cast<int32_t>(rounding.zero);
  }
  return rounding;
}

// The sum of a group from those of its vectors, which lie in neighbouring lanes.
__device__ __forceinline__ void store_group_sum(const Params& p, int column, float vector_sum) {
  const int lanes = p.group / kVector;
  float sum[1] = {vector_sum};
  sum_over_lanes(sum, lanes);
  if ((threadIdx.x & (lanes - 1)) == 0 && column < p.k) {
    p.sums[blockIdx.x * static_cast<int64_t>(p.groups) + (column >> p.group_shift)] = sum[0];
  }
}

template <DType dtype, Producer producer, int kVectors, bool kFast>
__global__ void __launch_bounds__(kMaxThreads) rows_kernel(const __grid_constant__ Params p) {
  Row<dtype, producer, kVectors, kFast> row(p);
  Partial part;
  for (int tile = p.tiles - 1; tile >= 0; --tile) {
    row.load(tile, &part.squares);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) part.range.add(row.value[v], p.symmetric);
  }
  part = reduce_over_cta<producer == Producer::kRmsNorm>(part);
  float factor = 1;
  if constexpr (producer == Producer::kRmsNorm) {
    factor = rsqrtf(__fdividef(part.squares, p.k) + p.eps);
    if (!(part.squares > 0x1p-100f && part.squares < 0x1p120f)) {
      factor = static_cast<float>(1 / sqrt(sum_over_cta(row.squares_in_float64()) / p.k + p.eps));
    }
    part.range.scale(factor);  // rounding is monotonic: the same as the range of the scaled values
  }
  Rounding rounding = finish_range(p, part.range);
  rounding.inverse = fminf(rounding.inverse * factor, FLT_MAX);  // of the unscaled values

  uint8_t* q = p.q + blockIdx.x * p.q_stride;
  int64_t row_sum = 0;
  for (int tile = 0; tile < p.tiles; ++tile) {
    float unused;
    if (tile > 0) row.load(tile, &unused);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int column = row.column(tile, v);
      const uint2 word = round_vector(p, rounding, row.value[v], column);
      store_vector(p, q, column, word);
      if (p.sums == nullptr) continue;
      const float sum = sum_of(p, word);
      if (p.group == 0) {
        row_sum += to_units(p, sum);
      } else {
        store_group_sum(p, column, sum);
      }
    }
  }
  if (p.sums != nullptr && p.group == 0) {
    row_sum = sum_over_cta(row_sum);
    if (threadIdx.x == 0) p.sums[blockIdx.x] = from_units(p, row_sum);
  }
}

}  // namespace qao::quantize
