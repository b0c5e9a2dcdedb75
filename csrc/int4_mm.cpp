#include "cpu/mm.h"
#include "int4_operands.h"
#include "norm.h"
#include "ops.h"
#include "qao/mm.h"
#include "rows.h"

namespace qao {
namespace {

// What the operators with a packed weight read beside x.
struct Weight {
  Weight(Op& op, const Tensor& weight_tensor, const Tensor& scales_tensor, const std::optional<Tensor>& bias_tensor,
         int64_t out_features, int64_t in_features, int64_t group_size)
      : weight("weight", weight_tensor),
        scales("scales", scales_tensor),
        n(out_features),
        k(in_features),
        group_size(group_size) {
    op.involve(&weight), op.involve(&scales);
    if (bias_tensor) op.involve(&bias.emplace("bias", *bias_tensor));
    op.involve("out_features", n), op.involve("in_features", k);
    op.involve("group_size", group_size);
  }
  Weight(const Weight&) = delete;  // op points to the arguments

  // The problem but for m and the alignment of x.
  mm::Problem checked(const Op& op, const Argument& x) const {
    mm::Problem problem;
    problem.weight = Format::kInt4;
    problem.x_dtype = problem.y_dtype = op.float_dtype(x);
    check_packed_sizes(op, n, k);
    op.check(x.dim() >= 1 && x.size(x.dim() - 1) == k, "x must have shape [..., in_features]",
             "Check x.shape against the layer's in_features");
    const int4::Weight packed = checked_packed(op, weight, scales, x, n, k, group_size);
    problem.n = packed.n, problem.k = packed.k;
    problem.group_size = packed.group_size;
    problem.has_zeros = packed.has_zeros;
    problem.scale_dtype = packed.scale_dtype;
    if (bias) {
      problem.has_bias = true;
      problem.bias_dtype = op.check_bias(*bias, x, n);
    }
    return problem;
  }
  mm::Arguments arguments() const {
    mm::Arguments arguments;
    arguments.weight = static_cast<const uint8_t*>(weight.data());
    arguments.scales = scales.data();
    arguments.bias = bias ? bias->data() : nullptr;
    return arguments;
  }

  Argument weight, scales;
  std::optional<Argument> bias;
  int64_t n, k, group_size;
};

#if defined(QAO_WITH_CUDA)
Gpu gpu_of(const Op& op, const Argument& x) {
  Gpu gpu;
  op.check(query_gpu(x.device_index(), &gpu));
  return gpu;
}
#endif

// y [..., n], or its gated half; x is there for its shape, dtype and device.
Tensor run(const Op& op, const mm::Problem& problem, mm::Arguments arguments, const Argument& x) {
  Tensor y = empty_rows(problem.gated ? problem.n / 2 : problem.n, x.dtype(), x);
  if (problem.m == 0) return y;
  arguments.y = y.data_ptr();
  if (x.is_cpu()) {
    op.check(cpu::mm(problem, arguments, torch_threads(problem.m * problem.n * problem.k)));
    return y;
  }
#if defined(QAO_WITH_CUDA)
  const DeviceScope scope(x);
  mm::Plan plan;
  op.check(mm::plan(problem, gpu_of(op, x), &plan));
  std::optional<Tensor> workspace;
  if (plan.workspace_bytes > 0) {
    workspace = empty({plan.workspace_bytes}, uint8_code(), x);
    arguments.workspace = workspace->data_ptr();
  }
  op.check(mm::launch(problem, plan, arguments, current_stream(x)));
  return y;
#else
  op.fail_without_cuda();
#endif
}

#if defined(QAO_WITH_CUDA)
// Whether one kernel makes all of it; `problem` and `arguments` are then complete.
bool fuse(const Norm& norm, bool gated, mm::Problem* problem, mm::Arguments* arguments) {
  const auto aligned = [&](const Rows& rows) { return rows.is_aligned(size_of(problem->x_dtype)); };
  if (!norm.x.is_cuda() || problem->m == 0) return false;
  if (norm.weight && (norm.problem.norm_weight_dtype != problem->x_dtype || !norm.weight->is_aligned(16))) return false;
  mm::Problem fused = *problem;
  fused.x_aligned = aligned(*norm.rows) && (!norm.residual || aligned(*norm.residual_rows));
  fused.normed = true, fused.gated = gated;
  if (!mm::fuses_norm(fused, gpu_of(norm.op, norm.x))) return false;
  *problem = fused;
  arguments->x = norm.arguments.x, arguments->x_stride = norm.arguments.x_stride;
  arguments->residual = norm.arguments.residual, arguments->residual_stride = norm.arguments.residual_stride;
  arguments->norm_weight = norm.arguments.norm_weight;
  arguments->sum = norm.arguments.sum;
  arguments->eps = norm.problem.eps;
  return true;
}
#else
bool fuse(const Norm&, bool, mm::Problem*, mm::Arguments*) { return false; }
#endif

}  // namespace

Tensor int4_mm_op(const Tensor& x_tensor, const Tensor& weight_tensor, const Tensor& scales_tensor,
                  const std::optional<Tensor>& bias_tensor, int64_t out_features, int64_t in_features,
                  int64_t group_size) {
  Op op("int4_mm");
  const Argument x("x", x_tensor);
  op.involve(&x);
  const Weight weight(op, weight_tensor, scales_tensor, bias_tensor, out_features, in_features, group_size);
  mm::Problem problem = weight.checked(op, x);
  const Rows rows(x_tensor, x);
  problem.m = rows.count;
  problem.x_aligned = rows.is_aligned(size_of(problem.x_dtype));
  mm::Arguments arguments = weight.arguments();
  arguments.x = rows.data;
  arguments.x_stride = rows.stride;
  return run(op, problem, arguments, x);
}

std::tuple<Tensor, Tensor> add_rms_norm_int4_mm_op(const Tensor& x, const std::optional<Tensor>& residual,
                                                   const std::optional<Tensor>& norm_weight, double eps,
                                                   const Tensor& weight_tensor, const Tensor& scales_tensor,
                                                   const std::optional<Tensor>& bias_tensor, int64_t out_features,
                                                   int64_t in_features, int64_t group_size, bool gated) {
  Norm norm("add_rms_norm_int4_mm", x, residual, norm_weight, eps, "norm_weight");
  const Weight weight(norm.op, weight_tensor, scales_tensor, bias_tensor, out_features, in_features, group_size);
  mm::Problem problem = weight.checked(norm.op, norm.x);
  norm.op.check(!gated || out_features % 2 == 0, "a gated weight must have an even number of rows",
                "Join the rows of gate and up, as many of each");
  problem.m = norm.problem.m;
  mm::Arguments arguments = weight.arguments();
  Tensor sum = norm.make_sum();
  if (fuse(norm, gated, &problem, &arguments)) return {run(norm.op, problem, arguments, norm.x), sum};

  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  arguments.x = normed.data_ptr();
  arguments.x_stride = problem.k;
  problem.x_aligned = problem.k * size_of(problem.x_dtype) % 16 == 0;
  const Tensor y = run(norm.op, problem, arguments, norm.x);
  if (!gated) return {y, sum};
  quantize::Problem silu_mul;
  silu_mul.m = problem.m, silu_mul.k = problem.n / 2;
  silu_mul.x_dtype = problem.x_dtype;
  silu_mul.producer = quantize::Producer::kSiluMul;
  quantize::Arguments halves;
  halves.x = y.data_ptr();
  halves.up = static_cast<const char*>(y.data_ptr()) + silu_mul.k * size_of(problem.x_dtype);
  halves.x_stride = halves.up_stride = problem.n;
  return {values(norm.op, silu_mul, halves, norm.x), sum};
}

}  // namespace qao
