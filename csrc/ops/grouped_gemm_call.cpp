// GroupedGemmCall: routing checks, gate, and launch.
#include "ops/grouped_gemm_call.h"

#include <string>
#include <utility>

#include "cpu/gemm/grouped.h"
#include "qao/grouped_gemm.h"

namespace qao {

GroupedGemmCall::GroupedGemmCall(Op& op, const Argument& x, const Tensor& weight, const Tensor* scales,
                                 const std::optional<Tensor>& bias, const Routing& routing)
    : GemmCall(op, x, weight, scales, bias), offsets_("offsets", routing.offsets) {
  op_.involve(&offsets_);
  if (routing.row_index) op_.involve(&row_index_.emplace("row_index", *routing.row_index));
  if (routing.row_scale) op_.involve(&row_scale_.emplace("row_scale", *routing.row_scale));
}

void GroupedGemmCall::hide_experts() {
  op_.check(x_.dim() == 2, "x must have shape [rows, in_features]", "Pass x.flatten(0, -2)");
  bool alike = true;
  for (Argument* operand : {&weight_, scales_ ? &*scales_ : nullptr, bias_ ? &*bias_ : nullptr,
                            weight_sums_ ? &*weight_sums_ : nullptr, row_scales_ ? &*row_scales_ : nullptr}) {
    if (operand == nullptr) continue;
    op_.check(operand->dim() >= 2,
              "weight, scales, bias, weight_sums and row_scales must have a dimension of experts, the first",
              "Stack the tensors of all experts");
    const int64_t count = operand->hide_first();
    if (operand == &weight_) experts_.count = count;
    alike = alike && count == experts_.count;
  }
  op_.check(experts_.count >= 1, "there must be at least one expert", "Pass weights of at least one");
  op_.check(alike,
            "weight, scales, bias, weight_sums and row_scales must have the same number of experts in dimension 0",
            "Stack the tensors of all experts");
  op_.note(" (shapes are of one expert, without the dimension of experts)");
}

void GroupedGemmCall::check_routing() {
  op_.note("");
  const bool has_begin = offsets_.has_shape({experts_.count + 1});
  op_.check(offsets_.dtype() == int32_code() && (has_begin || offsets_.has_shape({experts_.count})),
            "offsets must be int32 of shape [experts] or [experts + 1]", "Pass counts.cumsum(0, dtype=torch.int32)");
  op_.check_operand(offsets_, x_);
  experts_.ends = static_cast<const int32_t*>(offsets_.data()) + (has_begin ? 1 : 0);
  experts_.rows = problem.m;
  if (row_index_) {
    experts_.wide_index = row_index_->dtype() == int64_code();
    op_.check((experts_.wide_index || row_index_->dtype() == int32_code()) && row_index_->dim() == 1,
              "row_index must be int64 or int32 of one dimension, a row of x for each row of the result",
              "Pass None for an x that is sorted by expert");
    op_.check_operand(*row_index_, x_);
    experts_.rows = row_index_->numel();
    experts_.row_index = row_index_->data();
  }
  if (!row_scale_) return;
  experts_.row_scale_dtype = op_.float_dtype(*row_scale_);
  op_.check(row_scale_->has_shape({experts_.rows}), "row_scale must have one number for each row of the result",
            "Check its shape against row_index, or against x without one");
  op_.check_operand(*row_scale_, x_);
  experts_.row_scale = row_scale_->data();
}

// Validates offsets and row_index before launch, on the CPU only.
void GroupedGemmCall::check_values() const {
  if (offsets_.has_shape({experts_.count + 1}) && experts_.ends[-1] != 0) {
    op_.fail("the first of [experts + 1] offsets must be 0, where the first expert begins: " +
                 std::to_string(experts_.ends[-1]),
             "Leave out rows before it from x, or from row_index");
  }
  int32_t last = 0;
  for (int64_t e = 0; e < experts_.count; ++e) {
    const int32_t end = experts_.ends[e];
    if (end < last || end > experts_.rows) {
      op_.fail("offsets must not decrease and lie in 0.." + std::to_string(experts_.rows) +
                   ", the rows of the result: " + std::to_string(end) + " of expert " + std::to_string(e) +
                   " follows " + std::to_string(last),
               "Pass for each expert the row after its last one");
    }
    last = end;
  }
  if (!row_index_) return;
  for (int64_t s = 0; s < experts_.rows; ++s) {
    const int64_t row = experts_.index(s);
    if (row < 0 || row >= problem.m) {
      op_.fail("row_index must hold rows of x: it is " + std::to_string(row) + " at " + std::to_string(s),
               "Pass numbers from 0 to x.shape[0] - 1");
    }
  }
}

void GroupedGemmCall::use_gate(const GateNumbers& numbers) {
  gate_ = checked_gate(op_, numbers);
  op_.check(!gate_ || problem.n % 2 == 0, "a gated weight must have an even number of rows",
            "Concatenate the rows of gate and up, equally many of each");
}

Tensor GroupedGemmCall::run(const GateNumbers& gate) {
  if (problem.batch_invariant) keep_rows_apart();
  use_bias_and_sums();
  check_routing();
  use_gate(gate);
  if (x_.is_cpu()) check_values();
  Tensor y = empty({experts_.rows, gate_ ? problem.n / 2 : problem.n}, torch_dtype(problem.y_dtype), x_);
  if (experts_.rows == 0) return y;
  arguments.y = y.data_ptr();
  const int64_t scale_bytes = is_packed(problem.weight) ? size_of(problem.scale_dtype) : 4;
  experts_.weight_bytes = weight_.numel();
  experts_.scales_bytes = scales_ ? scales_->numel() * scale_bytes : 0;
  experts_.bias_bytes = problem.n * size_of(problem.bias_dtype);
  experts_.sums_bytes = problem.n * 4;
  if (x_.is_cpu()) {
    if (quantized_ && problem.m > 0) make_quantized_x();
    op_.check(cpu::grouped_gemm(problem, arguments, experts_, gate_ ? &*gate_ : nullptr,
                                torch_threads(experts_.rows * problem.n * problem.k)));
    return y;
  }
#if defined(QAO_WITH_CUDA)
  run_on_gpu(y);
  return y;
#else
  op_.fail_without_cuda();
#endif
}

#if defined(QAO_WITH_CUDA)
void GroupedGemmCall::run_on_gpu(Tensor& y) {
  const DeviceScope scope(x_);
  const Gpu gpu = gpu_of(op_, x_);
  gemm::Plan plan;
  op_.check(gemm::plan(problem, experts_, gpu, &plan));
  if (quantized_ && problem.m > 0) quantized_->make(op_, arguments);
  std::optional<Tensor> workspace, gemm;
  if (plan.workspace_bytes > 0) {
    arguments.workspace = workspace.emplace(empty({plan.workspace_bytes}, uint8_code(), x_)).data_ptr();
  }
  void* const stream = current_stream(x_);
  if (!gate_) return op_.check(gemm::launch(problem, plan, arguments, experts_, stream));

  quantize::Problem behind;
  behind.m = experts_.rows, behind.k = problem.n / 2;
  behind.x_dtype = problem.y_dtype;
  behind.format = Format::kFloat;
  behind.producer = quantize::Producer::kSwiglu, behind.gate = *gate_;
  quantize::Arguments rows;
  rows.x = arguments.y = gemm.emplace(empty({behind.m, problem.n}, torch_dtype(behind.x_dtype), x_)).data_ptr();
  rows.x_stride = problem.n;
  rows.y = y.data_ptr();
  gemm::Experts unscaled = experts_;
  std::swap(unscaled.row_scale, rows.row_scale);
  rows.row_scale_dtype = unscaled.row_scale_dtype;
  op_.check(gemm::launch(problem, plan, arguments, unscaled, stream));
  qao::run(op_, behind, rows, x_);
}
#endif

}  // namespace qao
