// C++ functions of the operators, registered by library.cpp.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <optional>
#include <span>
#include <tuple>
#include <vector>

#include "gate.h"
#include "named.h"
#include "tensor.h"

namespace qao {

// mm.cpp, scaled_mm.cpp
std::span<const Operator> products();
std::span<const Operator> scaled_products();

// grouped_mm.cpp
Tensor int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                          const std::optional<Tensor>& bias, const Tensor& offsets,
                          const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                          int64_t out_features, int64_t in_features, int64_t group_size, bool batch_invariant,
                          const GateNumbers& gate);
Tensor fp4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const Tensor& offsets, const std::optional<Tensor>& row_index,
                         const std::optional<Tensor>& row_scale, int64_t out_features, int64_t in_features,
                         int64_t group_size, bool batch_invariant, const GateNumbers& gate);
Tensor int8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                          const std::optional<Tensor>& bias, const Tensor& offsets,
                          const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                          bool batch_invariant, const GateNumbers& gate);
Tensor fp8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const Tensor& offsets, const std::optional<Tensor>& row_index,
                         const std::optional<Tensor>& row_scale, bool batch_invariant, const GateNumbers& gate);
Tensor int8_int8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                               const std::optional<Tensor>& bias, const Tensor& offsets,
                               const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                               const std::optional<Tensor>& weight_sums, bool batch_invariant, int64_t x_rotation,
                               const GateNumbers& gate);
Tensor int8_int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                               const std::optional<Tensor>& bias, const Tensor& offsets,
                               const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                               const std::optional<Tensor>& weight_sums, int64_t out_features, int64_t in_features,
                               int64_t group_size, const std::optional<Tensor>& row_scales, bool batch_invariant,
                               int64_t x_rotation, const GateNumbers& gate);
Tensor fp8_fp8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                             const std::optional<Tensor>& bias, const Tensor& offsets,
                             const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                             const std::optional<Tensor>& x_scale, int64_t x_group_size, bool fast_accum,
                             bool batch_invariant, const GateNumbers& gate);
Tensor fp8_int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                              const std::optional<Tensor>& bias, const Tensor& offsets,
                              const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                              int64_t out_features, int64_t in_features, int64_t group_size,
                              const std::optional<Tensor>& row_scales, bool batch_invariant, bool fast_accum,
                              const GateNumbers& gate);

// experts.cpp
std::tuple<Tensor, Tensor, Tensor> expert_sort_op(const Tensor& experts, int64_t num_experts);
std::tuple<Tensor, Tensor> expert_topk_op(const Tensor& logits, int64_t top_k, bool sigmoid,
                                          const std::optional<Tensor>& bias, bool normalized, double factor,
                                          int64_t groups, int64_t top_groups);
Tensor expert_sum_op(const Tensor& rows, const Tensor& places, const Tensor& weights);

// norm_mm.cpp
std::tuple<Tensor, Tensor> add_rms_norm_int4_mm_op(const Tensor& x, const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& norm_weight, double eps,
                                                   const Tensor& weight, const Tensor& scales,
                                                   const std::optional<Tensor>& bias, int64_t out_features,
                                                   int64_t in_features, int64_t group_size, bool gated);

// quantize.cpp
std::tuple<Tensor, Tensor, Tensor> int8_quantize_op(const Tensor& x, bool symmetric, int64_t rotation);
Tensor hadamard_op(const Tensor& x, int64_t size);
std::tuple<Tensor, Tensor> fp8_quantize_op(const Tensor& x, int64_t group_size, const std::optional<Tensor>& scale);
std::tuple<Tensor, Tensor> add_rms_norm_op(const Tensor& x, const std::optional<Tensor>& residual,
                                           const std::optional<Tensor>& weight, double eps);
Tensor silu_mul_op(const Tensor& gate, const Tensor& up);
std::tuple<Tensor, Tensor> rms_norm_quantize_op(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                                torch::headeronly::ScalarType dtype);
std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantize_op(const Tensor& x, const std::optional<Tensor>& residual,
                                                            const std::optional<Tensor>& weight, double eps,
                                                            torch::headeronly::ScalarType dtype);
std::tuple<Tensor, Tensor> silu_mul_quantize_op(const Tensor& gate, const Tensor& up,
                                                torch::headeronly::ScalarType dtype);
Tensor swiglu_op(const Tensor& x, double alpha, double limit, double shift, bool interleaved);
std::tuple<Tensor, Tensor> swiglu_quantize_op(const Tensor& x, double alpha, double limit, double shift,
                                              bool interleaved, torch::headeronly::ScalarType dtype);

// quantize_weight.cpp
std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_groups_op(const Tensor& weight, int64_t group_size,
                                                              torch::headeronly::ScalarType dtype, bool symmetric,
                                                              torch::headeronly::ScalarType scale_dtype,
                                                              std::vector<double> factors,
                                                              const std::optional<Tensor>& importance, bool whole_zeros,
                                                              int64_t rounds);
std::tuple<Tensor, Tensor, Tensor> quantize_blocks_op(const Tensor& weight, int64_t rows, int64_t columns);
std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_fp4_op(const Tensor& weight, int64_t group_size);

// quantize_weight_in_place.cpp
void quantize_weight_in_place_op(const Tensor& weight, torch::headeronly::ScalarType dtype, int64_t rows,
                                 int64_t columns, bool symmetric, bool whole_zeros, const Tensor& q,
                                 const Tensor& scales, const Tensor& fault, const std::optional<Tensor>& largest);
Tensor load_weight_op(const Tensor& weight, torch::headeronly::ScalarType dtype, int64_t rows, int64_t columns,
                      bool symmetric, bool whole_zeros, const Tensor& q, const Tensor& scales, double limit);
Tensor largest_magnitude_op(const Tensor& weight);

// int4_pack.cpp
std::tuple<Tensor, Tensor> pack_int4_op(const Tensor& q, const Tensor& scales, const std::optional<Tensor>& zeros,
                                        int64_t group_size);
std::tuple<Tensor, Tensor, Tensor> unpack_int4_op(const Tensor& weight, const Tensor& scales, int64_t out_features,
                                                  int64_t in_features, int64_t group_size);
Tensor dequantize_int4_op(const Tensor& weight, const Tensor& scales, int64_t out_features, int64_t in_features,
                          int64_t group_size, torch::headeronly::ScalarType dtype);

// gptq.cpp
std::tuple<Tensor, Tensor, Tensor> gptq_columns_op(const Tensor& weight, const Tensor& moved, const Tensor& scales,
                                                   const std::optional<Tensor>& zeros, const Tensor& ratios,
                                                   torch::headeronly::ScalarType dtype);

// embedding.cpp
Tensor int4_embedding_op(const Tensor& ids, const Tensor& weight, const Tensor& scales, int64_t num_embeddings,
                         int64_t embedding_dim, int64_t group_size, torch::headeronly::ScalarType dtype);
Tensor int8_embedding_op(const Tensor& ids, const Tensor& weight, const Tensor& scales,
                         torch::headeronly::ScalarType dtype);

}  // namespace qao
