// GEMM operators with activations that are already quantized to 8 bits.
#include "ops/gemm_call.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

Tensor int8_scaled_mm(const Tensor& x, const Tensor& x_scales, const std::optional<Tensor>& x_zeros,
                      const Tensor& weight, const Tensor& scales, const std::optional<Tensor>& bias,
                      const std::optional<Tensor>& weight_sums, torch::headeronly::ScalarType out_dtype,
                      bool batch_invariant) {
  Call call("int8_scaled_mm", x);
  GemmCall gemm(call.op, call.x, weight, &scales, bias);
  gemm.add_weight_sums(weight_sums);
  const Argument scales_of_x("x_scales", x_scales);
  call.op.involve(&scales_of_x);
  std::optional<Argument> zeros;
  if (x_zeros) call.op.involve(&zeros.emplace("x_zeros", *x_zeros));
  gemm.use_weight(kInt8Rows);
  gemm.use_scaled_x(x, Format::kInt8, scales_of_x, zeros ? &*zeros : nullptr, out_dtype);
  gemm.problem.batch_invariant = batch_invariant;
  return gemm.run();
}

Tensor fp8_scaled_mm(const Tensor& x, const Tensor& x_scales, const Tensor& weight, const Tensor& scales,
                     const std::optional<Tensor>& bias, torch::headeronly::ScalarType out_dtype, bool fast_accum,
                     bool batch_invariant) {
  Call call("fp8_scaled_mm", x);
  GemmCall gemm(call.op, call.x, weight, &scales, bias);
  const Argument scales_of_x("x_scales", x_scales);
  call.op.involve(&scales_of_x);
  gemm.use_weight(kFp8Rows);
  gemm.problem.fast_accum = fast_accum;
  gemm.use_scaled_x(x, Format::kFp8, scales_of_x, nullptr, out_dtype);
  gemm.problem.batch_invariant = batch_invariant;
  return gemm.run();
}

constexpr Operator kOperators[] = {
    operator_of<"int8_scaled_mm", int8_scaled_mm>(
        "int8_scaled_mm(Tensor x, Tensor x_scales, Tensor? x_zeros, Tensor weight, Tensor scales, Tensor? bias, "
        "Tensor? weight_sums, ScalarType out_dtype, bool batch_invariant=False) -> Tensor"),
    operator_of<"fp8_scaled_mm", fp8_scaled_mm>(
        "fp8_scaled_mm(Tensor x, Tensor x_scales, Tensor weight, Tensor scales, Tensor? bias, ScalarType out_dtype, "
        "bool fast_accum, bool batch_invariant=False) -> Tensor"),
};

}  // namespace

Operators scaled_mm_operators() { return kOperators; }

}  // namespace qao
