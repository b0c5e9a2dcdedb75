#include "qao/int4_mm.h"

#include "cpu/int4_mm.h"
#include "int4_operands.h"
#include "ops.h"
#include "rows.h"

namespace qao {

Tensor int4_mm_op(const Tensor& x_tensor, const Tensor& weight_tensor, const Tensor& scales_tensor,
                  const std::optional<Tensor>& bias_tensor, int64_t out_features, int64_t in_features,
                  int64_t group_size) {
  Op op("int4_mm");
  const Argument x("x", x_tensor), weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&x), op.involve(&weight), op.involve(&scales);
  std::optional<Argument> bias;
  if (bias_tensor) op.involve(&bias.emplace("bias", *bias_tensor));
  op.involve("out_features", out_features), op.involve("in_features", in_features);
  op.involve("group_size", group_size);

  int4_mm::Problem problem;
  problem.x_dtype = op.float_dtype(x);
  op.check(out_features >= 1 && in_features >= 1, "out_features and in_features must be at least 1",
           "Pass the N and K of the weight that was packed");
  op.check(x.dim() >= 1 && x.size(x.dim() - 1) == in_features, "x must have shape [..., in_features]",
           "Check x.shape against the layer's in_features");
  problem.k = in_features;
  problem.n = out_features;
  problem.group_size = checked_group_size(op, group_size, problem.k);
  check_packed(op, weight, scales, x, problem);
  if (bias) {
    problem.has_bias = true;
    problem.bias_dtype = op.check_bias(*bias, x, problem.n);
  }

  const Rows rows(x_tensor, x);
  problem.m = rows.count;
  problem.x_aligned = rows.is_aligned(size_of(problem.x_dtype));

  Tensor y = empty_rows(problem.n, x.dtype(), x);
  if (problem.m == 0) return y;

  int4_mm::Arguments arguments;
  arguments.x = rows.data;
  arguments.x_stride = rows.stride;
  arguments.weight = static_cast<const uint8_t*>(weight.data());
  arguments.scales = scales.data();
  arguments.bias = bias ? bias->data() : nullptr;
  arguments.y = y.data_ptr();

  if (x.is_cpu()) {
    op.check(cpu::int4_mm(problem, arguments, torch_threads(problem.m * problem.n * problem.k)));
    return y;
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(x);
  Gpu gpu;
  op.check(query_gpu(x.device_index(), &gpu));
  int4_mm::Plan plan;
  op.check(int4_mm::plan(problem, gpu, &plan));
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    workspace = empty({plan.workspace_bytes}, uint8_code(), x);
    arguments.workspace = workspace->data_ptr();
  }
  op.check(int4_mm::launch(problem, plan, arguments, current_stream(x)));
  return y;
#else
  op.fail_without_cuda();
#endif
}

}  // namespace qao
