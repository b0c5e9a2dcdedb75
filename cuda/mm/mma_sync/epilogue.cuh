// What becomes of a sum over all of K, and the kernel that adds up split-K parts.
#pragma once

#include "common/convert.cuh"
#include "mm/mma_sync/kernels.h"
#include "mm/mma_sync/store.cuh"

namespace qao::mm::mma_sync {

// How a token was quantised.
struct Token {
  float scale, zero;
};
__device__ __forceinline__ Token token_of(const Epilogue& e, int64_t m) {
  return {e.x_scales == nullptr ? 1.0f : e.x_scales[m * e.x_scale_stride],
          e.x_zeros == nullptr ? 0.0f : static_cast<float>(e.x_zeros[m])};
}

// Scale, sum and bias of rows n .. n + 3 of W, as far as they exist.
struct Rows {
  float scale[4], sum[4], bias[4];
};
__device__ __forceinline__ Rows rows_of(const Epilogue& e, int n) {
  Rows rows = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i >= e.n) break;
    if (e.scales != nullptr) rows.scale[i] = e.scales[static_cast<int64_t>(n + i) * e.scale_stride];
    if (e.weight_sums != nullptr) rows.sum[i] = e.weight_sums[n + i];
    if (e.bias != nullptr) rows.bias[i] = load_float(e.bias, n + i, e.bias_dtype);
  }
  return rows;
}

// What the sums of four rows become.
__device__ __forceinline__ void finish_four(const Epilogue& e, const Rows& rows, const Token& token,
                                            float (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (e.scales != nullptr) value[i] *= rows.scale[i];
    if (e.weight_sums != nullptr) value[i] -= token.zero * rows.sum[i];
    value[i] *= token.scale;
    if (e.bias != nullptr) value[i] += rows.bias[i];
  }
}

// The rows' results of token m: to y, or to this split's partial sums.
__device__ __forceinline__ void write_four(const Epilogue& e, int split, int64_t m, int n, const Rows& rows,
                                           const Token& token, float (&value)[4]) {
  if (e.partials != nullptr) return store_four(e.partials + split * e.m * e.n, DType::kFloat32, m, n, e.n, value);
  finish_four(e, rows, token, value);
  store_four(e.y, e.y_dtype, m, n, e.n, value);
}

// A thread has four rows of W of one token. It adds what `splits` CTAs left in `partials`, in a fixed order.
static __global__ void __launch_bounds__(256) finish_kernel(const float* partials, int splits, const Epilogue e) {
  const int quads = (e.n + 3) / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t m = index / quads;
  const int n = static_cast<int>(index % quads) * 4;
  if (m >= e.m) return;
  float value[4] = {};
  for (int s = 0; s < splits; ++s) {
    const float* partial = partials + (s * e.m + m) * e.n + n;
    if (e.n % 4 == 0) {
      const float4 four = *reinterpret_cast<const float4*>(partial);
      value[0] += four.x, value[1] += four.y, value[2] += four.z, value[3] += four.w;
    } else {
      for (int i = 0; i < 4 && n + i < e.n; ++i) value[i] += partial[i];
    }
  }
  write_four(e, 0, m, n, rows_of(e, n), token_of(e, m), value);
}

}  // namespace qao::mm::mma_sync
