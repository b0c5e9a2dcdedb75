// RMSNorm, int4 GEMM and optional SiLU-multiply, fused into one kernel where that is faster.
#include "norm.h"
#include "operators.h"
#include "product.h"

namespace qao {
namespace {

#if defined(QAO_WITH_CUDA)
// Returns whether one kernel runs all steps, and prepares the product for it.
bool fuse(const Norm& norm, bool gated, Product& product) {
  const auto aligned = [&](const Rows& rows) { return rows.is_aligned(size_of(product.problem.x_dtype)); };
  if (!norm.x.is_cuda() || product.problem.m == 0) return false;
  if (norm.weight && (norm.problem.norm_weight_dtype != product.problem.x_dtype || !norm.weight->is_aligned(16))) {
    return false;
  }
  mm::Problem fused = product.problem;
  fused.x_aligned = aligned(*norm.rows) && (!norm.residual || aligned(*norm.residual_rows));
  fused.normed = true, fused.gated = gated;
  if (!mm::fuses_norm(fused, gpu_of(norm.op, norm.x))) return false;
  product.problem = fused;
  mm::Arguments& arguments = product.arguments;
  arguments.x = norm.arguments.x, arguments.x_stride = norm.arguments.x_stride;
  arguments.residual = norm.arguments.residual, arguments.residual_stride = norm.arguments.residual_stride;
  arguments.norm_weight = norm.arguments.norm_weight;
  arguments.sum = norm.arguments.sum;
  arguments.eps = norm.problem.eps;
  return true;
}
#else
bool fuse(const Norm&, bool, Product&) { return false; }
#endif

// SiLU of the first half of each row of y times the second half.
Tensor gate(const Norm& norm, const Tensor& y, int64_t n) {
  quantize::Problem problem;
  problem.m = norm.problem.m, problem.k = n / 2;
  problem.x_dtype = norm.problem.x_dtype;
  problem.producer = quantize::Producer::kSiluMul;
  quantize::Arguments halves;
  halves.x = y.data_ptr();
  halves.up = static_cast<const char*>(y.data_ptr()) + problem.k * size_of(problem.x_dtype);
  halves.x_stride = halves.up_stride = n;
  return values(norm.op, problem, halves, norm.x);
}

std::tuple<Tensor, Tensor> add_rms_norm_int4_mm(const Tensor& x, const std::optional<Tensor>& residual,
                                                const std::optional<Tensor>& norm_weight, const Tensor& weight,
                                                const Tensor& scales, const std::optional<Tensor>& bias, double eps,
                                                int64_t out_features, int64_t in_features, int64_t group_size,
                                                bool gated) {
  Norm norm("add_rms_norm_int4_mm", x, residual, norm_weight, eps, "norm_weight");
  Product product(norm.op, norm.x, weight, scales, bias);
  product.use_packed_weight({out_features, in_features, group_size});
  norm.op.check(!gated || out_features % 2 == 0, "a gated weight must have an even number of rows",
                "Concatenate the rows of gate and up, equally many of each");
  product.problem.m = norm.problem.m;
  product.problem.x_dtype = product.problem.y_dtype = norm.problem.x_dtype;
  Tensor sum = norm.make_sum();
  if (fuse(norm, gated, product)) return {product.run(), sum};

  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  product.arguments.x = normed.data_ptr();
  product.arguments.x_stride = product.problem.k;
  product.problem.x_aligned = product.problem.k * size_of(product.problem.x_dtype) % 16 == 0;
  const Tensor y = product.run();
  return {gated ? gate(norm, y, out_features) : y, sum};
}

constexpr Operator kOperators[] = {
    operator_of<"add_rms_norm_int4_mm", add_rms_norm_int4_mm>(
        "add_rms_norm_int4_mm(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor weight, Tensor scales, "
        "Tensor? bias, float eps, int out_features, int in_features, int group_size, bool gated) -> (Tensor, Tensor)"),
};

}  // namespace

Operators norm_mm_operators() { return kOperators; }

}  // namespace qao
