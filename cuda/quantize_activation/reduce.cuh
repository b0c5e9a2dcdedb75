// Sums and maxima over the threads of a CTA in a fixed order, broadcast to all threads.
//
// Call each function at most once per kernel, since its shared memory is not synchronized for reuse.
#pragma once

#include "quantize_activation/vector.cuh"

namespace qao::quantize {

template <typename T>
__device__ __forceinline__ T sum_over_warp(T value) {
#pragma unroll
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(~0u, value, lane);
  return value;
}

template <typename T>
__device__ __forceinline__ T sum_over_cta(T value) {
  __shared__ T partial[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = sum_over_warp(value);
  if (warps == 1) return value;
  if (lane == 0) partial[threadIdx.x / 32] = value;
  __syncthreads();
  return sum_over_warp(lane < warps ? partial[lane] : T{0});
}

// Inputs of a row's scale.
struct Partial {
  Range range;
  float squares = 0;
};

template <bool with_squares>
__device__ __forceinline__ Partial reduce_over_warp(const Partial& part) {
  return {{__reduce_max_sync(~0u, part.range.high), __reduce_max_sync(~0u, part.range.below)},
          with_squares ? sum_over_warp(part.squares) : 0};
}

template <bool with_squares>
__device__ __forceinline__ Partial reduce_over_cta(Partial part) {
  __shared__ Partial partial[32];
  const int thread = threadIdx.y * blockDim.x + threadIdx.x, lane = thread % 32, warps = blockDim.x * blockDim.y / 32;
  part = reduce_over_warp<with_squares>(part);
  if (warps == 1) return part;
  if (lane == 0) partial[thread / 32] = part;
  __syncthreads();
  return reduce_over_warp<with_squares>(lane < warps ? partial[lane] : Partial{});
}

}  // namespace qao::quantize
