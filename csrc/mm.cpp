// GEMM operators, one function and one table row each: set W, then x, then run.
#include "fp8_operands.h"
#include "ops.h"
#include "product.h"

namespace qao {
namespace {

Tensor int4_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
               int64_t out_features, int64_t in_features, int64_t group_size, bool batch_invariant) {
  Call call("int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_packed_weight(product.int4_sizes({out_features, in_features, group_size}));
  product.use_float_x(x);
  return product.run(batch_invariant);
}

Tensor int8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
               bool batch_invariant) {
  Call call("int8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_weight(kInt8Rows);
  product.use_float_x(x);
  return product.run(batch_invariant);
}

Tensor fp8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
              bool batch_invariant) {
  Call call("fp8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_weight(kFp8Rows);
  product.use_float_x(x);
  return product.run(batch_invariant);
}

Tensor fp4_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
              int64_t out_features, int64_t in_features, int64_t group_size, bool batch_invariant) {
  Call call("fp4_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_fp4_weight(product.fp4_sizes({out_features, in_features, group_size}));
  product.use_float_x(x);
  return product.run(batch_invariant);
}

Tensor int8_int8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& weight_sums, bool batch_invariant, int64_t x_rotation) {
  Call call("int8_int8_mm", x);
  Product product(call.op, call.x, weight, scales, bias, weight_sums);
  product.use_weight(kInt8Rows);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow, nullptr, x_rotation);
  return product.run(batch_invariant);
}

Tensor int8_int4_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                    const std::optional<Tensor>& weight_sums, int64_t out_features, int64_t in_features,
                    int64_t group_size, const std::optional<Tensor>& row_scales, bool batch_invariant,
                    int64_t x_rotation) {
  Call call("int8_int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias, weight_sums);
  std::optional<Argument> of_rows;
  if (row_scales) call.op.involve(&of_rows.emplace("row_scales", *row_scales));
  product.use_packed_weight(product.int4_sizes({out_features, in_features, group_size}));
  if (of_rows) product.use_row_scales(*of_rows);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow, nullptr, x_rotation);
  return product.run(batch_invariant);
}

Tensor fp8_fp8_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                  const std::optional<Tensor>& x_scale, int64_t x_group_size, bool fast_accum, bool batch_invariant) {
  Call call("fp8_fp8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  std::optional<Argument> given;
  if (x_scale) call.op.involve(&given.emplace("x_scale", *x_scale));
  call.op.involve("x_group_size", x_group_size);
  product.use_weight(kFp8Rows);
  product.problem.fast_accum = fast_accum;
  const Scaling scaling = x_scaling_of(call.op, x_group_size);
  if (given) check_static_scale(call.op, *given, call.x, scaling);
  product.use_dynamic_x(x, Format::kFp8, scaling, given ? &*given : nullptr);
  return product.run(batch_invariant);
}

Tensor fp8_int4_mm(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                   int64_t out_features, int64_t in_features, int64_t group_size,
                   const std::optional<Tensor>& row_scales, bool batch_invariant, bool fast_accum) {
  Call call("fp8_int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  std::optional<Argument> of_rows;
  if (row_scales) call.op.involve(&of_rows.emplace("row_scales", *row_scales));
  product.use_packed_weight(product.int4_sizes({out_features, in_features, group_size}));
  if (of_rows) product.use_row_scales(*of_rows);
  product.problem.fast_accum = fast_accum;
  product.use_dynamic_x(x, Format::kFp8, Scaling::kRow);
  return product.run(batch_invariant);
}

constexpr Operator kProducts[] = {
    operator_of<"int4_mm", int4_mm>("int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features=0, "
                                    "int in_features=0, int group_size=0, bool batch_invariant=False) -> Tensor"),
    operator_of<"int8_mm", int8_mm>(
        "int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, bool batch_invariant=False) -> Tensor"),
    operator_of<"fp8_mm", fp8_mm>(
        "fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, bool batch_invariant=False) -> Tensor"),
    operator_of<"fp4_mm", fp4_mm>("fp4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int out_features=0, "
                                  "int in_features=0, int group_size=0, bool batch_invariant=False) -> Tensor"),
    operator_of<"int8_int8_mm", int8_int8_mm>(
        "int8_int8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, "
        "Tensor? weight_sums=None, bool batch_invariant=False, int x_rotation=0) -> Tensor"),
    operator_of<"int8_int4_mm", int8_int4_mm>(
        "int8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? weight_sums=None, int "
        "out_features=0, "
        "int in_features=0, int group_size=0, Tensor? row_scales=None, bool batch_invariant=False, int x_rotation=0) "
        "-> Tensor"),
    operator_of<"fp8_fp8_mm", fp8_fp8_mm>(
        "fp8_fp8_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, Tensor? "
        "x_scale=None, int x_group_size=-1, bool fast_accum=False, bool batch_invariant=False) -> Tensor"),
    operator_of<"fp8_int4_mm", fp8_int4_mm>(
        "fp8_int4_mm(Tensor x, Tensor weight, Tensor scales, Tensor? bias, int "
        "out_features=0, int in_features=0, int group_size=0, Tensor? row_scales=None, bool batch_invariant=False, "
        "bool fast_accum=False) -> Tensor"),
};

}  // namespace

std::span<const Operator> products() { return kProducts; }

}  // namespace qao
