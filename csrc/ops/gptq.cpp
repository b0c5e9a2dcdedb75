// GPTQ operator: rounds a block of columns with error feedback.
#include "qao/gptq.h"

#include "cpu/gptq.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

using torch::headeronly::ScalarType;

std::tuple<Tensor, Tensor, Tensor> gptq_columns(const Tensor& weight_tensor, const Tensor& moved_tensor,
                                                const Tensor& scales_tensor, const std::optional<Tensor>& zeros_tensor,
                                                const Tensor& ratios_tensor, ScalarType dtype) {
  Op op("gptq_columns");
  const Argument weight("weight", weight_tensor), moved("moved", moved_tensor), scales("scales", scales_tensor);
  const Argument ratios("ratios", ratios_tensor);
  op.involve(&weight), op.involve(&moved), op.involve(&scales), op.involve(&ratios);
  std::optional<Argument> zeros;
  if (zeros_tensor) op.involve(&zeros.emplace("zeros", *zeros_tensor));

  op.check(weight.dim() == 2 && weight.size(0) >= 1 && weight.size(0) <= gptq::kMaxColumns && weight.size(1) >= 1,
           "weight must have shape [B, N], B from 1 to 128, N at least 1", "Pass a block of columns, transposed");
  gptq::Problem problem;
  problem.columns = weight.size(0), problem.rows = weight.size(1);
  op.check(ratios.has_shape({problem.columns, problem.columns}), "ratios must have shape [B, B]",
           "Pass those of the columns in weight");
  const Argument* all[] = {&weight, &moved, &scales, &ratios, zeros ? &*zeros : &scales};
  for (const Argument* given : all) {
    op.check(given == &ratios || given->has_shape({problem.columns, problem.rows}),
             "moved, scales and zeros must have the shape of weight", "Repeat the scale of a group for its columns");
    op.check(given->dtype() == float32_code() && given->is_contiguous(), "all tensors must be float32 and contiguous",
             "Call .float().contiguous() on them");
    op.check(given->same_device(weight), "the tensors are on different devices",
             "Move them to one device with .to(device)");
  }
  int32_t code_dtype = 0;
  if (dtype == ScalarType::Byte) {
    problem.codes = Format::kInt4, code_dtype = uint8_code();
  } else if (dtype == ScalarType::Char) {
    problem.codes = Format::kInt8, code_dtype = int8_code();
  } else {
    op.check(dtype == ScalarType::Float8_e4m3fn, "dtype must be uint8 (0..15), int8 (-127..127) or float8_e4m3fn",
             "Pass torch.uint8, torch.int8 or torch.float8_e4m3fn");
    problem.codes = Format::kFp8, code_dtype = fp8_code();
  }

  Tensor codes = empty({problem.columns, problem.rows}, code_dtype, weight);
  Tensor errors = empty({problem.columns, problem.rows}, float32_code(), weight);
  Tensor rests = empty({problem.columns, problem.rows}, float32_code(), weight);
  gptq::Arguments arguments;
  arguments.weight = static_cast<const float*>(weight.data()),
  arguments.moved = static_cast<const float*>(moved.data());
  arguments.scales = static_cast<const float*>(scales.data());
  if (zeros) arguments.zeros = static_cast<const float*>(zeros->data());
  arguments.ratios = static_cast<const float*>(ratios.data());
  arguments.codes = static_cast<uint8_t*>(codes.data_ptr());
  arguments.errors = static_cast<float*>(errors.data_ptr()), arguments.rests = static_cast<float*>(rests.data_ptr());
  if (weight.is_cpu()) {
    cpu::gptq_round_columns(problem, arguments, torch_threads(problem.rows * problem.columns * problem.columns));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(gptq::round_columns(problem, arguments, current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return {codes, errors, rests};
}

constexpr Operator kOperators[] = {
    operator_of<"gptq_columns", gptq_columns>(
        "gptq_columns(Tensor weight, Tensor moved, Tensor scales, Tensor? zeros, Tensor ratios, ScalarType dtype)"
        " -> (Tensor, Tensor, Tensor)"),
};

}  // namespace

Operators gptq_operators() { return kOperators; }

}  // namespace qao
