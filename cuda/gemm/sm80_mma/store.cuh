// Stores of results to global memory.
#pragma once

#include "common/convert.cuh"

namespace qao::gemm::sm80_mma {

// Stores the values of rows n .. n + 3 of W that exist to row m of `to` [..., of].
__device__ __forceinline__ void store_four(void* to, DType dtype, int64_t m, int n, int of, const float (&value)[4]) {
  const int64_t at = m * of + n;
  if (of % 4 == 0) return store_float4(to, at, dtype, value);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (n + i < of) store_float(to, at + i, dtype, value[i]);
  }
}

}  // namespace qao::gemm::sm80_mma
