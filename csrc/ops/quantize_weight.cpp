// Operators that quantize weights into unpacked tensors.
#include "cpu/quantize_weight.h"

#include <algorithm>

#include "ops/int4_operands.h"
#include "stable_abi/operators.h"
#include "stable_abi/rows.h"

namespace qao {

using torch::headeronly::ScalarType;

namespace {

void check_weight(const Op& op, const Argument& weight) {
  op.check(weight.dim() == 2 && weight.numel() > 0, "weight must have shape [N, K], N and K at least 1",
           "Check weight.shape");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_groups(const Tensor& weight_tensor,
                                                           const std::optional<Tensor>& importance_tensor,
                                                           int64_t group_size, ScalarType dtype, bool symmetric,
                                                           ScalarType scale_dtype, std::vector<double> factors,
                                                           bool whole_zeros, int64_t rounds) {
  Op op("quantize_groups");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight);
  op.involve("group_size", group_size), op.involve("rounds", rounds);
  std::optional<Argument> importance;
  if (importance_tensor) {
    importance.emplace("importance", *importance_tensor);
    op.involve(&*importance);
  }
  check_weight(op, weight);
  groups::Problem problem;
  problem.n = weight.size(0), problem.k = weight.size(1);
  problem.weight_dtype = op.float_dtype(weight);
  problem.group_size = checked_group_size(op, group_size, problem.k);
  op.check(dtype == ScalarType::Byte || (dtype == ScalarType::Char && symmetric),
           "dtype must be uint8 (0..15), or with a symmetric weight int8", "Pass torch.uint8 or torch.int8");
  problem.format = dtype == ScalarType::Byte ? Format::kInt4 : Format::kInt8;
  problem.symmetric = symmetric;
  problem.scale_dtype = op.float_dtype("scale_dtype", scale_dtype);
  std::vector<float> multiples(factors.begin(), factors.end());
  bool usable = !multiples.empty();
  for (float factor : multiples) usable = usable && factor > 0 && factor <= std::numeric_limits<float>::max();
  op.check(usable, "factors must be positive and finite, at least one", "Pass [1.0] for no search");
  problem.factors = multiples.data(), problem.factor_count = static_cast<int64_t>(multiples.size());

  op.check(rounds >= 0, "rounds must not be negative", "Pass 0 for scales and zero points as the factors make them");
  problem.whole_zeros = whole_zeros, problem.rounds = rounds;

  if (importance) {
    op.check_operand(*importance, weight);
    op.check(importance->dtype() == float32_code() && importance->has_shape({problem.k}),
             "importance must be float32 [K]", "Pass None if all columns count equally");
  }

  const Rows rows(weight_tensor, weight);
  Tensor q = empty({problem.n, problem.k}, dtype == ScalarType::Byte ? uint8_code() : int8_code(), weight);
  Tensor scales = empty({problem.n, problem.groups()}, torch_dtype(problem.scale_dtype), weight);
  Tensor zeros = empty({problem.n, problem.groups()}, torch_dtype(problem.scale_dtype), weight);
  Tensor squares = empty({2}, float64_code(), weight);
  groups::Arguments arguments;
  arguments.weight = rows.data, arguments.weight_stride = rows.stride;
  arguments.q = static_cast<uint8_t*>(q.data_ptr());
  arguments.scales = scales.data_ptr(), arguments.zeros = zeros.data_ptr();
  arguments.squares = static_cast<double*>(squares.data_ptr());
  if (importance) arguments.importance = static_cast<const float*>(importance->data());
  if (weight.is_cpu()) {
    const int64_t passes = problem.factor_count + rounds;
    op.check(cpu::quantize_weight(problem, arguments, torch_threads(problem.n * problem.k * passes)));
  } else {
#if defined(QAO_WITH_CUDA)
    op.check(problem.factor_count <= groups::kMaxFactors, "on a GPU there may be 64 factors", "Pass fewer");
    const DeviceScope scope(weight);
    Tensor workspace = empty({groups::workspace_doubles(problem)}, float64_code(), weight);
    arguments.workspace = static_cast<double*>(workspace.data_ptr());
    op.check(groups::launch(problem, arguments, current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return {q, scales, zeros, squares};
}

std::tuple<Tensor, Tensor, Tensor> quantize_blocks(const Tensor& weight_tensor, int64_t rows, int64_t columns) {
  Op op("quantize_blocks");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight);
  op.involve("rows", rows), op.involve("columns", columns);
  op.check(weight.is_cpu(), "weight must be on the CPU",
           "Move it with .cpu(); quantize_ takes a model on a GPU as well");
  check_weight(op, weight);
  op.check(rows >= 1 && columns >= 1, "rows and columns of a block must be at least 1",
           "Pass 1 and K for a scale a row, N and K for one, 128 and 128 for blocks");
  cpu::BlockProblem problem;
  problem.n = weight.size(0), problem.k = weight.size(1);
  problem.weight_dtype = op.float_dtype(weight);
  problem.rows = std::min(rows, problem.n), problem.columns = std::min(columns, problem.k);

  const Rows source(weight_tensor, weight);
  Tensor q = empty({problem.n, problem.k}, fp8_code(), weight);
  Tensor scales = empty({problem.block_rows(), problem.block_columns()}, float32_code(), weight);
  Tensor squares = empty({2}, float64_code(), weight);
  cpu::WeightArguments arguments;
  arguments.weight = source.data, arguments.weight_stride = source.stride;
  arguments.q = static_cast<uint8_t*>(q.data_ptr());
  arguments.scales = scales.data_ptr(), arguments.squares = static_cast<double*>(squares.data_ptr());
  op.check(cpu::quantize_weight_fp8(problem, arguments, torch_threads(problem.n * problem.k)));
  return {q, scales, squares};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_fp4(const Tensor& weight_tensor, int64_t group_size) {
  Op op("quantize_fp4");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight);
  op.involve("group_size", group_size);
  op.check(weight.is_cpu(), "weight must be on the CPU",
           "Move it with .cpu(); quantize_ takes a model on a GPU as well");
  check_weight(op, weight);
  op.check(group_size == 32 || group_size == 16, "group_size must be 32 (MXFP4) or 16 (NVFP4)", "Pass 32 or 16");
  cpu::Fp4Problem problem;
  problem.n = weight.size(0), problem.k = weight.size(1);
  problem.weight_dtype = op.float_dtype(weight);
  problem.is_nvfp4 = group_size == 16;

  const Rows source(weight_tensor, weight);
  Tensor q = empty({problem.n, problem.k}, uint8_code(), weight);
  Tensor scales = empty({problem.n, problem.groups()}, torch_dtype(DType::kBFloat16), weight);
  Tensor divisor = empty({1}, float32_code(), weight);
  Tensor squares = empty({2}, float64_code(), weight);
  cpu::WeightArguments arguments;
  arguments.weight = source.data, arguments.weight_stride = source.stride;
  arguments.q = static_cast<uint8_t*>(q.data_ptr());
  arguments.scales = scales.data_ptr(), arguments.zeros = divisor.data_ptr();
  arguments.squares = static_cast<double*>(squares.data_ptr());
  op.check(cpu::quantize_weight_fp4(problem, arguments, torch_threads(problem.n * problem.k)));
  return {q, scales, divisor, squares};
}

constexpr Operator kOperators[] = {
    operator_of<"quantize_groups", quantize_groups>(
        "quantize_groups(Tensor weight, Tensor? importance, int group_size, ScalarType dtype, bool symmetric, "
        "ScalarType scale_dtype, float[] factors, bool whole_zeros=False, int rounds=0) -> (Tensor, Tensor, Tensor, "
        "Tensor)"),
    operator_of<"quantize_blocks", quantize_blocks>(
        "quantize_blocks(Tensor weight, int rows, int columns) -> (Tensor, Tensor, Tensor)"),
    operator_of<"quantize_fp4", quantize_fp4>(
        "quantize_fp4(Tensor weight, int group_size) -> (Tensor, Tensor, Tensor, Tensor)"),
};

}  // namespace

Operators quantize_weight_operators() { return kOperators; }

}  // namespace qao
