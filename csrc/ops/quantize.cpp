// Operators that quantize activations, with or without a fused producer.
#include "qao/quantize.h"

#include <torch/csrc/stable/ops.h>

#include "cpu/quantize.h"
#include "ops/fp8_operands.h"
#include "ops/gate.h"
#include "ops/norm.h"
#include "ops/rotation.h"
#include "stable_abi/operators.h"

namespace qao {

using quantize::Arguments;
using quantize::Problem;

void run(const Op& op, const Problem& problem, const Arguments& arguments, const Argument& x) {
  if (x.is_cpu()) {
    op.check(cpu::quantize(problem, arguments, torch_threads()));
    return;
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(x);
  Arguments with_workspace = arguments;
  std::optional<Tensor> workspace;
  if (const int64_t bytes = quantize::workspace_bytes(problem); bytes > 0) {
    with_workspace.workspace = workspace.emplace(empty({bytes}, uint8_code(), x)).data_ptr();
  }
  op.check(quantize::launch(problem, with_workspace, current_stream(x)));
#else
  op.fail_without_cuda();
#endif
}

namespace {

// q [..., K], scales [..., 1] and zeros [..., 1] of quantization per row.
struct PerRow {
  Tensor q, scales, zeros;
};
PerRow quantize_rows(const Op& op, const Problem& problem, Arguments arguments, const Argument& x) {
  const int32_t q_dtype = problem.format == Format::kInt8 ? int8_code() : fp8_code();
  PerRow result{empty_rows(problem.k, q_dtype, x), empty_rows(1, float32_code(), x), empty_rows(1, int32_code(), x)};
  if (problem.m == 0) return result;
  arguments.q = result.q.data_ptr();
  arguments.q_stride = problem.k;
  arguments.scales = static_cast<float*>(result.scales.data_ptr());
  if (problem.format == Format::kInt8) arguments.zeros = static_cast<int32_t*>(result.zeros.data_ptr());
  run(op, problem, arguments, x);
  return result;
}

Format eight_bit_format(const Op& op, torch::headeronly::ScalarType dtype) {
  if (dtype == torch::headeronly::ScalarType::Char) return Format::kInt8;
  op.check(dtype == torch::headeronly::ScalarType::Float8_e4m3fn, "dtype must be int8 or float8_e4m3fn",
           "Pass torch.int8 or torch.float8_e4m3fn");
  return Format::kFp8;
}

// Inputs of operators that begin with SiLU(gate) * up.
struct SiluMul {
  SiluMul(const char* name, const Tensor& gate_tensor, const Tensor& up_tensor)
      : op(name), gate("gate", gate_tensor), up("up", up_tensor) {
    op.involve(&gate), op.involve(&up);
    rows.emplace(rows_of(op, gate_tensor, gate, &problem));
    check_alike(op, up, gate, "up must have the shape, dtype and device of gate");
    up_rows.emplace(up_tensor, up);
    problem.producer = quantize::Producer::kSiluMul;
    arguments.x = rows->data, arguments.x_stride = rows->stride;
    arguments.up = up_rows->data, arguments.up_stride = up_rows->stride;
  }
  SiluMul(const SiluMul&) = delete;

  Op op;
  Argument gate, up;
  std::optional<Rows> rows, up_rows;
  Problem problem;
  Arguments arguments;
};

// Inputs of operators that begin with gate and up in one tensor.
struct Swiglu {
  Swiglu(const char* name, const Tensor& tensor, double alpha, double limit, double shift, bool interleaved)
      : op(name), x("x", tensor) {
    op.involve(&x);
    rows.emplace(rows_of(op, tensor, x, &problem));
    op.check(problem.k % 2 == 0, "x must have an even number of columns", "Pass gate and up with equally many columns");
    problem.gate = checked_gate(op, alpha, limit, shift, interleaved);
    problem.k /= 2;
    problem.producer = quantize::Producer::kSwiglu;
    arguments.x = rows->data, arguments.x_stride = rows->stride;
  }
  Swiglu(const Swiglu&) = delete;

  Op op;
  Argument x;
  std::optional<Rows> rows;
  Problem problem;
  Arguments arguments;
};

}  // namespace

Tensor values(const Op& op, Problem problem, Arguments arguments, const Argument& x) {
  Tensor y = empty_rows(problem.k, x.dtype(), x);
  if (problem.m == 0) return y;
  problem.format = Format::kFloat;
  arguments.y = y.data_ptr();
  run(op, problem, arguments, x);
  return y;
}

namespace {

std::tuple<Tensor, Tensor, Tensor> int8_quantize(const Tensor& x_tensor, bool symmetric, int64_t rotation) {
  Op op("int8_quantize");
  const Argument x("x", x_tensor);
  op.involve(&x);
  Problem problem;
  const Rows rows = rows_of(op, x_tensor, x, &problem);
  problem.symmetric = symmetric;
  problem.rotate(checked_rotation(op, rotation, problem.k));
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  PerRow result = quantize_rows(op, problem, arguments, x);
  return {result.q, result.scales, result.zeros};
}

std::tuple<Tensor, Tensor> fp8_quantize(const Tensor& x_tensor, const std::optional<Tensor>& scale_tensor,
                                        int64_t group_size) {
  Op op("fp8_quantize");
  const Argument x("x", x_tensor);
  op.involve(&x);
  std::optional<Argument> scale;
  if (scale_tensor) op.involve(&scale.emplace("scale", *scale_tensor));
  op.involve("group_size", group_size);
  Problem problem;
  const Rows rows = rows_of(op, x_tensor, x, &problem);
  problem.format = Format::kFp8;
  problem.scaling = x_scaling_of(op, group_size);
  problem.static_scale = scale.has_value();
  if (scale) check_static_scale(op, *scale, x, problem.scaling);
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  if (problem.scaling == Scaling::kRow) {
    PerRow result = quantize_rows(op, problem, arguments, x);
    return {result.q, result.scales};
  }
  Tensor q = empty_rows(problem.k, fp8_code(), x);
  Tensor scales = scale                                 ? torch::stable::clone(*scale_tensor)
                  : problem.scaling == Scaling::kTensor ? empty({1}, float32_code(), x)
                                                        : empty_rows(problem.blocks(), float32_code(), x);
  if (problem.m == 0) return {q, scale ? scales : torch::stable::zero_(scales)};
  arguments.q = q.data_ptr();
  arguments.q_stride = problem.k;
  arguments.scales = static_cast<float*>(scales.data_ptr());
  run(op, problem, arguments, x);
  return {q, scales};
}

std::tuple<Tensor, Tensor> add_rms_norm(const Tensor& x, const std::optional<Tensor>& residual,
                                        const std::optional<Tensor>& weight, double eps) {
  Norm norm("add_rms_norm", x, residual, weight, eps);
  Tensor sum = norm.make_sum();
  return {values(norm.op, norm.problem, norm.arguments, norm.x), sum};
}

std::tuple<Tensor, Tensor> rms_norm_quantize(const Tensor& x, const std::optional<Tensor>& weight, double eps,
                                             torch::headeronly::ScalarType dtype) {
  Norm norm("rms_norm_quantize", x, std::nullopt, weight, eps);
  norm.problem.format = eight_bit_format(norm.op, dtype);
  PerRow result = quantize_rows(norm.op, norm.problem, norm.arguments, norm.x);
  return {result.q, result.scales};
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_quantize(const Tensor& x, const std::optional<Tensor>& residual,
                                                         const std::optional<Tensor>& weight, double eps,
                                                         torch::headeronly::ScalarType dtype) {
  Norm norm("add_rms_norm_quantize", x, residual, weight, eps);
  norm.problem.format = eight_bit_format(norm.op, dtype);
  Tensor sum = norm.make_sum();
  PerRow result = quantize_rows(norm.op, norm.problem, norm.arguments, norm.x);
  return {result.q, result.scales, sum};
}

Tensor hadamard(const Tensor& x_tensor, int64_t size) {
  Op op("hadamard");
  const Argument x("x", x_tensor);
  op.involve(&x);
  Problem problem;
  const Rows rows = rows_of(op, x_tensor, x, &problem);
  problem.rotate(checked_rotation(op, size, problem.k, false));
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  return values(op, problem, arguments, x);
}

Tensor silu_mul(const Tensor& gate, const Tensor& up) {
  SiluMul gemm("silu_mul", gate, up);
  return values(gemm.op, gemm.problem, gemm.arguments, gemm.gate);
}

std::tuple<Tensor, Tensor> silu_mul_quantize(const Tensor& gate, const Tensor& up,
                                             torch::headeronly::ScalarType dtype) {
  SiluMul gemm("silu_mul_quantize", gate, up);
  gemm.problem.format = eight_bit_format(gemm.op, dtype);
  PerRow result = quantize_rows(gemm.op, gemm.problem, gemm.arguments, gemm.gate);
  return {result.q, result.scales};
}

Tensor swiglu(const Tensor& x, double alpha, double limit, double shift, bool interleaved) {
  Swiglu gemm("swiglu", x, alpha, limit, shift, interleaved);
  return values(gemm.op, gemm.problem, gemm.arguments, gemm.x);
}

std::tuple<Tensor, Tensor> swiglu_quantize(const Tensor& x, double alpha, double limit, double shift, bool interleaved,
                                           torch::headeronly::ScalarType dtype) {
  Swiglu gemm("swiglu_quantize", x, alpha, limit, shift, interleaved);
  gemm.problem.format = eight_bit_format(gemm.op, dtype);
  PerRow result = quantize_rows(gemm.op, gemm.problem, gemm.arguments, gemm.x);
  return {result.q, result.scales};
}

constexpr Operator kOperators[] = {
    operator_of<"int8_quantize", int8_quantize>(
        "int8_quantize(Tensor x, bool symmetric, int rotation=0) -> (Tensor, Tensor, Tensor)"),
    operator_of<"hadamard", hadamard>("hadamard(Tensor x, int size) -> Tensor"),
    operator_of<"fp8_quantize", fp8_quantize>(
        "fp8_quantize(Tensor x, Tensor? scale, int group_size) -> (Tensor, Tensor)"),
    operator_of<"add_rms_norm", add_rms_norm>(
        "add_rms_norm(Tensor x, Tensor? residual, Tensor? weight, float eps) -> (Tensor, Tensor)"),
    operator_of<"silu_mul", silu_mul>("silu_mul(Tensor gate, Tensor up) -> Tensor"),
    operator_of<"rms_norm_quantize", rms_norm_quantize>(
        "rms_norm_quantize(Tensor x, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, Tensor)"),
    operator_of<"add_rms_norm_quantize", add_rms_norm_quantize>(
        "add_rms_norm_quantize(Tensor x, Tensor? residual, Tensor? weight, float eps, ScalarType dtype) -> (Tensor, "
        "Tensor, Tensor)"),
    operator_of<"silu_mul_quantize", silu_mul_quantize>(
        "silu_mul_quantize(Tensor gate, Tensor up, ScalarType dtype) -> (Tensor, Tensor)"),
    operator_of<"swiglu", swiglu>(
        "swiglu(Tensor x, float alpha, float limit, float shift, bool interleaved) -> Tensor"),
    operator_of<"swiglu_quantize", swiglu_quantize>(
        "swiglu_quantize(Tensor x, float alpha, float limit, float shift, bool interleaved, ScalarType dtype)"
        " -> (Tensor, Tensor)"),
};

}  // namespace

Operators quantize_operators() { return kOperators; }

}  // namespace qao
