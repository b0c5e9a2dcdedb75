// Grouped GEMM operators: set the weights of the experts, then x, then run.
#include "fp8_operands.h"
#include "grouped_product.h"
#include "ops.h"

namespace qao {

Tensor int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                          const std::optional<Tensor>& bias, const Tensor& offsets,
                          const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                          int64_t out_features, int64_t in_features, int64_t group_size, bool batch_invariant,
                          const GateNumbers& gate) {
  Call call("int4_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  product.use_packed_weight({out_features, in_features, group_size});
  product.use_float_x(x);
  return product.run(batch_invariant, gate);
}

Tensor fp4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const Tensor& offsets, const std::optional<Tensor>& row_index,
                         const std::optional<Tensor>& row_scale, int64_t out_features, int64_t in_features,
                         int64_t group_size, bool batch_invariant, const GateNumbers& gate) {
  Call call("fp4_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  product.use_fp4_weight({out_features, in_features, group_size});
  product.use_float_x(x);
  return product.run(batch_invariant, gate);
}

Tensor int8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                          const std::optional<Tensor>& bias, const Tensor& offsets,
                          const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                          bool batch_invariant, const GateNumbers& gate) {
  Call call("int8_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  product.use_weight(kInt8Rows);
  product.use_float_x(x);
  return product.run(batch_invariant, gate);
}

Tensor fp8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const Tensor& offsets, const std::optional<Tensor>& row_index,
                         const std::optional<Tensor>& row_scale, bool batch_invariant, const GateNumbers& gate) {
  Call call("fp8_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  product.use_weight(kFp8Rows);
  product.use_float_x(x);
  return product.run(batch_invariant, gate);
}

Tensor int8_int8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                               const std::optional<Tensor>& bias, const Tensor& offsets,
                               const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                               const std::optional<Tensor>& weight_sums, bool batch_invariant, int64_t x_rotation,
                               const GateNumbers& gate) {
  Call call("int8_int8_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale}, weight_sums);
  product.use_weight(kInt8Rows);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow, nullptr, x_rotation);
  return product.run(batch_invariant, gate);
}

Tensor int8_int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                               const std::optional<Tensor>& bias, const Tensor& offsets,
                               const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                               const std::optional<Tensor>& weight_sums, int64_t out_features, int64_t in_features,
                               int64_t group_size, const std::optional<Tensor>& row_scales, bool batch_invariant,
                               int64_t x_rotation, const GateNumbers& gate) {
  Call call("int8_int4_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale}, weight_sums);
  std::optional<Argument> of_rows;
  if (row_scales) call.op.involve(&of_rows.emplace("row_scales", *row_scales));
  product.use_packed_weight({out_features, in_features, group_size});
  if (of_rows) product.use_row_scales(*of_rows);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow, nullptr, x_rotation);
  return product.run(batch_invariant, gate);
}

Tensor fp8_fp8_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                             const std::optional<Tensor>& bias, const Tensor& offsets,
                             const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                             const std::optional<Tensor>& x_scale, int64_t x_group_size, bool fast_accum,
                             bool batch_invariant, const GateNumbers& gate) {
  Call call("fp8_fp8_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  std::optional<Argument> given;
  if (x_scale) call.op.involve(&given.emplace("x_scale", *x_scale));
  call.op.involve("x_group_size", x_group_size);
  product.use_weight(kFp8Rows);
  product.problem.fast_accum = fast_accum;
  const Scaling scaling = x_scaling_of(call.op, x_group_size);
  if (given) check_static_scale(call.op, *given, call.x, scaling);
  product.use_dynamic_x(x, Format::kFp8, scaling, given ? &*given : nullptr);
  return product.run(batch_invariant, gate);
}

Tensor fp8_int4_grouped_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales,
                              const std::optional<Tensor>& bias, const Tensor& offsets,
                              const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale,
                              int64_t out_features, int64_t in_features, int64_t group_size,
                              const std::optional<Tensor>& row_scales, bool batch_invariant, bool fast_accum,
                              const GateNumbers& gate) {
  Call call("fp8_int4_grouped_mm", x);
  GroupedProduct product(call.op, call.x, weight, scales, bias, {offsets, row_index, row_scale});
  std::optional<Argument> of_rows;
  if (row_scales) call.op.involve(&of_rows.emplace("row_scales", *row_scales));
  product.use_packed_weight({out_features, in_features, group_size});
  if (of_rows) product.use_row_scales(*of_rows);
  product.problem.fast_accum = fast_accum;
  product.use_dynamic_x(x, Format::kFp8, Scaling::kRow);
  return product.run(batch_invariant, gate);
}

}  // namespace qao
