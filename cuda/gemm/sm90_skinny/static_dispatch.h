// Static dispatch of the skinny-GEMM kernels.
// It covers groups per K-step, zero points and the dtype of the scales.
#pragma once

#include "qao/types.h"

namespace qao::gemm::sm90_skinny {

// Calls of.template operator()<groups, zeros, dtype>(); `groups` per K-step is 1, 2 or 4.
template <typename Of>
auto variant(int groups, bool has_zeros, DType dtype, const Of& of) {
  const auto of_dtype = [&]<int count, bool zeros>() {
    if (dtype == DType::kBFloat16) return of.template operator()<count, zeros, DType::kBFloat16>();
    if (dtype == DType::kFloat16) return of.template operator()<count, zeros, DType::kFloat16>();
    return of.template operator()<count, zeros, DType::kFloat32>();
  };
  const auto of_zeros = [&]<int count>() {
    return has_zeros ? of_dtype.template operator()<count, true>() : of_dtype.template operator()<count, false>();
  };
  if (groups == 1) return of_zeros.template operator()<1>();
  if (groups == 2) return of_zeros.template operator()<2>();
  return of_zeros.template operator()<4>();
}

}  // namespace qao::gemm::sm90_skinny
