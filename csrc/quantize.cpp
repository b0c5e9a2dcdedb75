#include "qao/quantize.h"

#include "cpu/quantize.h"
#include "fp8_operands.h"
#include "ops.h"
#include "rows.h"

namespace qao {
namespace {

using quantize::Arguments;
using quantize::Problem;

// The rows of an input, for a problem whose m, k and x_dtype they become.
Rows rows_of(const Op& op, const Tensor& tensor, const Argument& x, Problem* problem) {
  problem->x_dtype = op.float_dtype(x);
  op.check(x.dim() >= 1 && x.size(x.dim() - 1) >= 1, "x must have shape [..., K], K at least 1",
           "Pass at least one column");
  problem->k = x.size(x.dim() - 1);
  Rows rows(tensor, x);
  problem->m = rows.count;
  return rows;
}

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

// q [..., K], scales [..., 1] and zeros [..., 1] of a quantisation per row.
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

}  // namespace

std::tuple<Tensor, Tensor, Tensor> int8_quantize_op(const Tensor& x_tensor, bool symmetric) {
  Op op("int8_quantize");
  const Argument x("x", x_tensor);
  op.involve(&x);
  Problem problem;
  const Rows rows = rows_of(op, x_tensor, x, &problem);
  problem.symmetric = symmetric;
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  PerRow result = quantize_rows(op, problem, arguments, x);
  return {result.q, result.scales, result.zeros};
}

std::tuple<Tensor, Tensor> fp8_quantize_op(const Tensor& x_tensor, int64_t group_size,
                                           const std::optional<Tensor>& scale_tensor) {
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

std::tuple<Tensor, Tensor> rms_norm_quantize_op(const Tensor& x_tensor, const std::optional<Tensor>& weight_tensor,
                                                double eps, torch::headeronly::ScalarType dtype) {
  Op op("rms_norm_quantize");
  const Argument x("x", x_tensor);
  op.involve(&x);
  std::optional<Argument> weight;
  if (weight_tensor) op.involve(&weight.emplace("weight", *weight_tensor));
  Problem problem;
  const Rows rows = rows_of(op, x_tensor, x, &problem);
  problem.format = eight_bit_format(op, dtype);
  problem.producer = quantize::Producer::kRmsNorm;
  problem.eps = static_cast<float>(eps);
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  if (weight) {
    problem.norm_weight_dtype = op.float_dtype(*weight);
    op.check(weight->has_shape({problem.k}) && weight->is_contiguous(), "weight must be contiguous of shape [K]",
             "Check weight.shape against x.shape[-1]");
    op.check(weight->same_device(x), "weight and x are on different devices",
             "Move them to one device with .to(device)");
    arguments.norm_weight = weight->data();
  }
  PerRow result = quantize_rows(op, problem, arguments, x);
  return {result.q, result.scales};
}

std::tuple<Tensor, Tensor> silu_mul_quantize_op(const Tensor& gate_tensor, const Tensor& up_tensor,
                                                torch::headeronly::ScalarType dtype) {
  Op op("silu_mul_quantize");
  const Argument gate("gate", gate_tensor), up("up", up_tensor);
  op.involve(&gate), op.involve(&up);
  Problem problem;
  const Rows rows = rows_of(op, gate_tensor, gate, &problem);
  op.check(up.dtype() == gate.dtype() && up.same_device(gate) && up.dim() == gate.dim() &&
               std::equal(up.sizes(), up.sizes() + up.dim(), gate.sizes()),
           "up must have the shape, dtype and device of gate", "Check up.shape and up.dtype");
  const Rows up_rows(up_tensor, up);
  problem.format = eight_bit_format(op, dtype);
  problem.producer = quantize::Producer::kSiluMul;
  Arguments arguments;
  arguments.x = rows.data, arguments.x_stride = rows.stride;
  arguments.up = up_rows.data, arguments.up_stride = up_rows.stride;
  PerRow result = quantize_rows(op, problem, arguments, gate);
  return {result.q, result.scales};
}

}  // namespace qao
