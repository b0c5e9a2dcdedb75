// The products: W, then x, then run.
#include "fp8_operands.h"
#include "ops.h"
#include "product.h"

namespace qao {

Tensor int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                  int64_t out_features, int64_t in_features, int64_t group_size) {
  Call call("int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_packed_weight(out_features, in_features, group_size);
  product.use_float_x(x);
  return product.run();
}

Tensor int8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  Call call("int8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_weight(Format::kInt8);
  product.use_float_x(x);
  return product.run();
}

Tensor fp8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias) {
  Call call("fp8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_weight(Format::kFp8);
  product.use_float_x(x);
  return product.run();
}

Tensor int8_int8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& weight_sums) {
  Call call("int8_int8_mm", x);
  Product product(call.op, call.x, weight, scales, bias, weight_sums);
  product.use_weight(Format::kInt8);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow);
  return product.run();
}

Tensor int8_int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                       const std::optional<Tensor>& weight_sums, int64_t out_features, int64_t in_features,
                       int64_t group_size) {
  Call call("int8_int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias, weight_sums);
  product.use_packed_weight(out_features, in_features, group_size);
  product.use_dynamic_x(x, Format::kInt8, Scaling::kRow);
  return product.run();
}

Tensor fp8_fp8_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                     const std::optional<Tensor>& x_scale, int64_t x_group_size, bool fast_accum) {
  Call call("fp8_fp8_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  std::optional<Argument> given;
  if (x_scale) call.op.involve(&given.emplace("x_scale", *x_scale));
  call.op.involve("x_group_size", x_group_size);
  product.use_weight(Format::kFp8);
  product.problem.fast_accum = fast_accum;
  const Scaling scaling = x_scaling_of(call.op, x_group_size);
  if (given) check_static_scale(call.op, *given, call.x, scaling);
  product.use_dynamic_x(x, Format::kFp8, scaling, given ? &*given : nullptr);
  return product.run();
}

Tensor fp8_int4_mm_op(const Tensor& x, const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                      int64_t out_features, int64_t in_features, int64_t group_size) {
  Call call("fp8_int4_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  product.use_packed_weight(out_features, in_features, group_size);
  product.use_dynamic_x(x, Format::kFp8, Scaling::kRow);
  return product.run();
}

Tensor int8_scaled_mm_op(const Tensor& x, const Tensor& x_scales, const std::optional<Tensor>& x_zeros,
                         const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                         const std::optional<Tensor>& weight_sums, torch::headeronly::ScalarType out_dtype) {
  Call call("int8_scaled_mm", x);
  Product product(call.op, call.x, weight, scales, bias, weight_sums);
  const Argument scales_of_x("x_scales", x_scales);
  call.op.involve(&scales_of_x);
  std::optional<Argument> zeros;
  if (x_zeros) call.op.involve(&zeros.emplace("x_zeros", *x_zeros));
  product.use_weight(Format::kInt8);
  product.use_scaled_x(x, Format::kInt8, scales_of_x, zeros ? &*zeros : nullptr, out_dtype);
  return product.run();
}

Tensor fp8_scaled_mm_op(const Tensor& x, const Tensor& x_scales, const Tensor& weight, const Tensor& scales,
                        const std::optional<Tensor>& bias, torch::headeronly::ScalarType out_dtype, bool fast_accum) {
  Call call("fp8_scaled_mm", x);
  Product product(call.op, call.x, weight, scales, bias);
  const Argument scales_of_x("x_scales", x_scales);
  call.op.involve(&scales_of_x);
  product.use_weight(Format::kFp8);
  product.problem.fast_accum = fast_accum;
  product.use_scaled_x(x, Format::kFp8, scales_of_x, nullptr, out_dtype);
  return product.run();
}

}  // namespace qao
