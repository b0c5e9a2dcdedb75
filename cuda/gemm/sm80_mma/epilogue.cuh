// Epilogue of the mma.sync kernels, and the kernel that reduces split-K partial sums.
#pragma once

#include "common/convert.cuh"
#include "common/finish.cuh"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/store.cuh"
#include "gemm/sm80_mma/weight_only_fraction.cuh"

namespace qao::gemm::sm80_mma {

// Quantization parameters of a token.
struct Token {
  float scale, zero;
};
__device__ __forceinline__ Token token_of(const Epilogue& e, int64_t m) {
  return {e.x_scales == nullptr ? 1.0f : e.x_scales[m * e.x_scale_stride],
          e.x_zeros == nullptr ? 0.0f : static_cast<float>(e.x_zeros[m])};
}

// Scale, sum and bias of rows n .. n + 3 of W that exist.
struct Rows {
  float scale[4], sum[4], bias[4];
};
// `scaled`: false if there is a bias alone.
template <bool scaled>
__device__ __forceinline__ Rows rows_of(const Epilogue& e, int n) {
  Rows rows = {{1, 1, 1, 1}, {}, {}};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i >= e.n) break;
    if (scaled && e.scales != nullptr) rows.scale[i] = e.scales[static_cast<int64_t>(n + i) * e.scale_stride];
    if (scaled && e.weight_sums != nullptr) rows.sum[i] = e.weight_sums[n + i];
    if (e.bias != nullptr) rows.bias[i] = load_float(e.bias, n + i, e.bias_dtype);
  }
  return rows;
}

// Adds four partial sums: float32, or int32 in the bits of floats.
__device__ __forceinline__ void add_four(float (&total)[4], const float4& part, bool whole) {
  const float parts[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    int sum = __float_as_int(total[i]);
    if (whole) {
      add_part(sum, parts[i]);
      total[i] = as_part(sum);
    } else {
      total[i] += parts[i];
    }
  }
}

// Applies scales, zero points and bias to the sums of four rows.
template <bool scaled>
__device__ __forceinline__ void finish_four(const Epilogue& e, const Rows& rows, const Token& token,
                                            float (&value)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (scaled) {
      const float sum = e.whole_sums ? static_cast<float>(__float_as_int(value[i])) : value[i];
      value[i] = finished(sum, rows.scale[i], token.scale, token.zero, rows.sum[i], rows.bias[i]);
    } else {
      value[i] += rows.bias[i];
    }
  }
}

// Writes the results of four rows of token m to y, or to this split's partial sums.
template <bool scaled>
__device__ __forceinline__ void write_four(const Epilogue& e, int split, int64_t m, int n, const Rows& rows,
                                           const Token& token, float (&value)[4]) {
  if (e.partials != nullptr) return store_four(e.partials + split * e.m * e.n, DType::kFloat32, m, n, e.n, value);
  finish_four<scaled>(e, rows, token, value);
  store_four(e.y, e.y_dtype, m, n, e.n, value);
}

// Reduces the partial sums of `splits` CTAs in a fixed order. A thread handles four rows of W of one token.
template <bool fractions>
static __global__ void __launch_bounds__(256)
    sm80_mma_reduce(const float* partials, int splits, const Epilogue e, const Fractions of_zeros) {
  const int quads = (e.n + 3) / 4;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  const int64_t m = index / quads;
  const int n = static_cast<int>(index % quads) * 4;
  if (m >= e.m) return;
  float value[4] = {};
  for (int s = 0; s < splits; ++s) {
    const float* partial = partials + (s * e.m + m) * e.n + n;
    float4 four = {};
    if (e.n % 4 == 0) {
      four = *reinterpret_cast<const float4*>(partial);
    } else {
      four.x = partial[0];
      if (n + 1 < e.n) four.y = partial[1];
      if (n + 2 < e.n) four.z = partial[2];
      if (n + 3 < e.n) four.w = partial[3];
    }
    add_four(value, four, e.whole_sums);
  }
  if constexpr (fractions) add_fractions(of_zeros, n, m, value);
  write_four<true>(e, 0, m, n, rows_of<true>(e, n), token_of(e, m), value);
}

}  // namespace qao::gemm::sm80_mma
