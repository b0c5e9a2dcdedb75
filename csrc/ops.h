// The operators' C++ functions, as library.cpp registers them.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <tuple>

#include "tensor.h"

namespace qao {

// int4_mm.cpp
Tensor int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                  int64_t out_features, int64_t in_features, int64_t group_size);

// int4_pack.cpp
std::tuple<Tensor, Tensor> pack_int4_op(const Tensor& q, const Tensor& scales, const std::optional<Tensor>& zeros,
                                        int64_t group_size);
std::tuple<Tensor, Tensor, Tensor> unpack_int4_op(const Tensor& weight, const Tensor& scales, int64_t out_features,
                                                  int64_t in_features, int64_t group_size);
Tensor dequantize_int4_op(const Tensor& weight, const Tensor& scales, int64_t out_features, int64_t in_features,
                          int64_t group_size, torch::headeronly::ScalarType dtype);

}  // namespace qao
