// Eight neighbouring values of a weight, which another CTA may read as well.
#pragma once

#include "common/quantize.cuh"
#include "weight/params.h"

namespace qao::weight {

template <DType dtype>
__device__ __forceinline__ void load_vector(quantize::Packed<dtype>& vector, const Params& p, const void* row,
                                            int column, int columns) {
  if (p.aligned) {
    vector.template load<true, true>(row, column, columns);
  } else {
    vector.template load<false>(row, column, columns);
  }
}

}  // namespace qao::weight
