// Quantization with one scale per 1 x 128 block or per tensor, which needs no complete rows.
//
// A CTA has slices of blockDim.y rows, with blockDim.x threads of kVectors vectors per row.
#pragma once

#include "quantize_activation/reduce.cuh"
#include "quantize_activation/vector.cuh"

namespace qao::quantize {

constexpr int kStreamThreads = 256;
constexpr int kMaxParts = 1024;  // partial maxima of x

template <DType dtype, int kVectors>
struct Slice {
  // Zeros past the last row.
  __device__ __forceinline__ Slice(const Params& p, int64_t index)
      : row(index / p.slices * blockDim.y + threadIdx.y), first(static_cast<int>(index % p.slices)) {
    const char* x = static_cast<const char*>(p.x) + row * p.x_stride * size_of(dtype);
    const int columns = row < p.m ? p.k : 0;
    Packed<dtype> packed[kVectors];
    if (p.aligned) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) packed[v].template load<true>(x, column(v), columns);
    } else {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) packed[v].template load<false>(x, column(v), columns);
    }
#pragma unroll
    for (int v = 0; v < kVectors; ++v) packed[v].unpack(value[v]);
  }
  __device__ __forceinline__ int column(int v) const {
    return ((first * kVectors + v) * static_cast<int>(blockDim.x) + static_cast<int>(threadIdx.x)) * kVector;
  }

  int64_t row;
  int first;
  float value[kVectors][kVector];
};

__device__ __forceinline__ int64_t count_slices(const Params& p) {
  return (p.m + blockDim.y - 1) / blockDim.y * p.slices;
}

// Maxima of `parts` parts of x; part i consists of the slices i, i + parts, ...
template <DType dtype, int kVectors>
__global__ void __launch_bounds__(kStreamThreads) maxima_kernel(const __grid_constant__ Params p) {
  ptx::wait_then_launch_dependents();
  Partial part;
  for (int64_t index = blockIdx.x; index < count_slices(p); index += p.parts) {
    const Slice<dtype, kVectors> slice(p, index);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) part.range.add(slice.value[v], true);
  }
  part = reduce_over_cta<false>(part);
  if (threadIdx.x == 0 && threadIdx.y == 0) p.maxima[blockIdx.x] = __uint_as_float(part.range.high);
}

__device__ __forceinline__ float tensor_scale(const Params& p) {
  if (p.static_scale) return p.scales[0];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x;
  Partial part;
  for (int i = thread; i < p.parts; i += kStreamThreads) {
    part.range.high = max(part.range.high, __float_as_uint(p.maxima[i]));
  }
  const float scale = scale_of(reduce_over_cta<false>(part).range.high, kLargestFp8);
  if (blockIdx.x == 0 && thread == 0) p.scales[0] = scale;
  return scale;
}

template <DType dtype, Scaling scaling, int kVectors>
__global__ void __launch_bounds__(kStreamThreads) stream_kernel(const __grid_constant__ Params p) {
  ptx::wait_then_launch_dependents();
  const Slice<dtype, kVectors> slice(p, blockIdx.x);
  Rounding rounding;
  if constexpr (scaling == Scaling::kTensor) rounding = rounding_of(tensor_scale(p));
  if (slice.row >= p.m) return;  // uniform per warp
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int column = slice.column(v);
    if constexpr (scaling == Scaling::kBlock) {
      constexpr int kLanes = kScaleBlock / kVector;
      Range range;
      range.add(slice.value[v], true);
      uint32_t largest = range.high;
#pragma unroll
      for (int lane = 1; lane < kLanes; lane *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, lane));
      const float scale = scale_of(largest, kLargestFp8);
      rounding = rounding_of(scale);
      const int64_t blocks = (p.k + kScaleBlock - 1) / kScaleBlock;
      if (threadIdx.x % kLanes == 0 && column < p.k) p.scales[slice.row * blocks + column / kScaleBlock] = scale;
    }
    const uint2 word = round_vector(p, rounding, slice.value[v], column);
    uint8_t* q = p.q + slice.row * p.q_stride;
    p.q_aligned ? store_vector<true>(p, q, column, word) : store_vector<false>(p, q, column, word);
  }
}

}  // namespace qao::quantize
