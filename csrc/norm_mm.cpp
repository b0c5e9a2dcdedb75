// RMSNorm, int4 GEMM of one or several weights and optional SiLU-multiply, fused into one kernel where that is faster.
#include "merged_product.h"
#include "norm.h"
#include "operators.h"
#include "product.h"

namespace qao {
namespace {

// Adds the norm to a problem and arguments of a GEMM kernel. Returns false if none makes this norm.
bool add_norm(const Norm& norm, mm::Problem& problem, mm::Arguments& arguments) {
  const auto aligned = [&](const Rows& rows) { return rows.is_aligned(size_of(problem.x_dtype)); };
  if (!norm.x.is_cuda() || problem.m == 0) return false;
  if (norm.weight && (norm.problem.norm_weight_dtype != problem.x_dtype || !norm.weight->is_aligned(16))) return false;
  problem.x_aligned = aligned(*norm.rows) && (!norm.residual || aligned(*norm.residual_rows));
  problem.normed = true;
  arguments.x = norm.arguments.x, arguments.x_stride = norm.arguments.x_stride;
  arguments.residual = norm.arguments.residual, arguments.residual_stride = norm.arguments.residual_stride;
  arguments.norm_weight = norm.arguments.norm_weight;
  arguments.sum = norm.arguments.sum;
  arguments.eps = norm.problem.eps;
  return true;
}

#if defined(QAO_WITH_CUDA)
// Returns whether one kernel runs all steps, and prepares the product for it.
bool fuse(const Norm& norm, bool gated, Product& product) {
  mm::Problem fused = product.problem;
  mm::Arguments arguments = product.arguments;
  fused.gated = gated;
  if (!add_norm(norm, fused, arguments) || !mm::fuses_norm(fused, gpu_of(norm.op, norm.x))) return false;
  product.problem = fused, product.arguments = arguments;
  return true;
}
#else
bool fuse(const Norm&, bool, Product&) { return false; }
#endif

// Sets the activations of a product: those of the norm, or `normed`, what a kernel made of them.
void use_norm(const Norm& norm, Product& product) {
  product.problem.m = norm.problem.m;
  product.problem.x_dtype = product.problem.y_dtype = norm.problem.x_dtype;
}
void use_normed(const Tensor& normed, Product& product) {
  product.arguments.x = normed.data_ptr();
  product.arguments.x_stride = product.problem.k;
  product.problem.x_aligned = product.problem.k * size_of(product.problem.x_dtype) % 16 == 0;
}

// SiLU(gate) * up of n columns each. Rows are `stride` elements apart.
Tensor gate(const Norm& norm, const void* gate, const void* up, int64_t n, int64_t stride) {
  quantize::Problem problem;
  problem.m = norm.problem.m, problem.k = n;
  problem.x_dtype = norm.problem.x_dtype;
  problem.producer = quantize::Producer::kSiluMul;
  quantize::Arguments halves;
  halves.x = gate, halves.up = up;
  halves.x_stride = halves.up_stride = stride;
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
  norm.op.check(!gated || product.problem.n % 2 == 0, "a gated weight must have an even number of rows",
                "Concatenate the rows of gate and up, equally many of each");
  use_norm(norm, product);
  Tensor sum = norm.make_sum();
  if (fuse(norm, gated, product)) return {product.run(), sum};

  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  use_normed(normed, product);
  const Tensor y = product.run();
  if (!gated) return {y, sum};
  const int64_t half = product.problem.n / 2;
  const char* up = static_cast<const char*>(y.data_ptr()) + half * size_of(product.problem.x_dtype);
  return {gate(norm, y.data_ptr(), up, half, product.problem.n), sum};
}

// The products of RMSNorm(x + residual) with every weight, or SiLU(first) * second if gated; then x + residual.
Tensors merged_add_rms_norm_int4_mm(const Tensor& x, const std::optional<Tensor>& residual,
                                    const std::optional<Tensor>& norm_weight, Tensors weight, Tensors scales,
                                    Optionals bias, double eps, std::vector<int64_t> out_features, int64_t in_features,
                                    int64_t group_size, bool gated) {
  constexpr const char* kName = "_merged_add_rms_norm_int4_mm";
  Norm norm(kName, x, residual, norm_weight, eps, "norm_weight");
  Calls calls(kName, x, weight, scales, bias);
  calls.prepare([&](size_t i, Product& product) {
    product.use_packed_weight(calls.sizes(i, out_features, in_features, group_size));
    use_norm(norm, product);
  });
  const std::span<Product* const> products = calls.products;
  norm.op.check(!gated || (products.size() == 2 && products[0]->problem.n == products[1]->problem.n),
                "gated needs two weights with equally many rows", "Pass those of gate and up");
  Tensor sum = norm.make_sum();
  mm::Problem problem = products[0]->problem;
  mm::Arguments arguments = products[0]->arguments;
  problem.gated = gated;
  if (add_norm(norm, problem, arguments)) {
    if (auto ys = Product::run_fused(products, problem, arguments)) {
      ys->push_back(sum);
      return std::move(*ys);
    }
  }
  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  for (Product* product : products) use_normed(normed, *product);
  problem = products[0]->problem;
  problem.gated = gated;
  auto fused = Product::run_fused(products, problem, products[0]->arguments);
  Tensors ys = fused ? std::move(*fused) : Product::run_merged(products);
  if (gated && !fused) {
    const int64_t n = products[0]->problem.n;
    ys = {gate(norm, ys[0].data_ptr(), ys[1].data_ptr(), n, n)};
  }
  ys.push_back(sum);
  return ys;
}

constexpr Operator kOperators[] = {
    operator_of<"add_rms_norm_int4_mm", add_rms_norm_int4_mm>(
        "add_rms_norm_int4_mm(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor weight, Tensor scales, "
        "Tensor? bias, float eps, int out_features, int in_features, int group_size, bool gated) -> (Tensor, Tensor)"),
    operator_of<"_merged_add_rms_norm_int4_mm", merged_add_rms_norm_int4_mm>(
        "_merged_add_rms_norm_int4_mm(Tensor x, Tensor? residual, Tensor? norm_weight, Tensor[] weight, Tensor[] "
        "scales, Tensor?[] bias, float eps, int[] out_features=[], int in_features=0, int group_size=0, bool "
        "gated=False) -> Tensor[]"),
};

}  // namespace

Operators norm_mm_operators() { return kOperators; }

}  // namespace qao
