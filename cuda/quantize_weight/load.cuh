// Loads of eight adjacent values of a weight, which other CTAs may read as well.
#pragma once

#include "common/quantize.cuh"
#include "quantize_weight/params.h"

namespace qao::weight {

// Loads value by value. Not inlined: at every call site it would overflow the instruction cache.
template <DType dtype>
__device__ __noinline__ quantize::Packed<dtype> load_slowly(const void* row, int column, int columns) {
  quantize::Packed<dtype> vector;
  vector.template load<false>(row, column, columns);
  return vector;
}

template <DType dtype>
__device__ __forceinline__ void load_vector(quantize::Packed<dtype>& vector, const Params& p, const void* row,
                                            int column, int columns) {
  if (p.aligned) {
    vector.template load<true, true>(row, column, columns);
  } else {
    vector = load_slowly<dtype>(row, column, columns);
  }
}

}  // namespace qao::weight
