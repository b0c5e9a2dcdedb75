// RMSNorm, int4 GEMM of one or several weights and optional SiLU-multiply, fused into one kernel where that is faster.
#include "ops/gemm_call.h"
#include "ops/merged_gemm_call.h"
#include "ops/norm.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

// Adds the norm to a problem and arguments of a GEMM kernel. Returns false if none makes this norm.
bool add_norm(const Norm& norm, gemm::Problem& problem, gemm::Arguments& arguments) {
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
bool fuse(const Norm& norm, bool gated, GemmCall& gemm) {
  gemm::Problem fused = gemm.problem;
  gemm::Arguments arguments = gemm.arguments;
  fused.gated = gated;
  if (!add_norm(norm, fused, arguments) || !gemm::fuses_norm(fused, gpu_of(norm.op, norm.x))) return false;
  gemm.problem = fused, gemm.arguments = arguments;
  return true;
}
#else
bool fuse(const Norm&, bool, GemmCall&) { return false; }
#endif

// Sets the activations of a product: those of the norm, or `normed`, what a kernel made of them.
void use_norm(const Norm& norm, GemmCall& gemm) {
  gemm.problem.m = norm.problem.m;
  gemm.problem.x_dtype = gemm.problem.y_dtype = norm.problem.x_dtype;
}
void use_normed(const Tensor& normed, GemmCall& gemm) {
  gemm.arguments.x = normed.data_ptr();
  gemm.arguments.x_stride = gemm.problem.k;
  gemm.problem.x_aligned = gemm.problem.k * size_of(gemm.problem.x_dtype) % 16 == 0;
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
  GemmCall gemm(norm.op, norm.x, weight, &scales, bias);
  gemm.use_packed_weight({out_features, in_features, group_size});
  norm.op.check(!gated || gemm.problem.n % 2 == 0, "a gated weight must have an even number of rows",
                "Concatenate the rows of gate and up, equally many of each");
  use_norm(norm, gemm);
  Tensor sum = norm.make_sum();
  if (fuse(norm, gated, gemm)) return {gemm.run(), sum};

  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  use_normed(normed, gemm);
  const Tensor y = gemm.run();
  if (!gated) return {y, sum};
  const int64_t half = gemm.problem.n / 2;
  const char* up = static_cast<const char*>(y.data_ptr()) + half * size_of(gemm.problem.x_dtype);
  return {gate(norm, y.data_ptr(), up, half, gemm.problem.n), sum};
}

// The products of RMSNorm(x + residual) with every weight, or SiLU(first) * second if gated; then x + residual.
Tensors merged_add_rms_norm_int4_mm(const Tensor& x, const std::optional<Tensor>& residual,
                                    const std::optional<Tensor>& norm_weight, Tensors weight, Tensors scales,
                                    Optionals bias, double eps, std::vector<int64_t> out_features, int64_t in_features,
                                    int64_t group_size, bool gated) {
  constexpr const char* kName = "_merged_add_rms_norm_int4_mm";
  Norm norm(kName, x, residual, norm_weight, eps, "norm_weight");
  Calls calls(kName, x, weight, &scales, bias);
  calls.prepare([&](size_t i, GemmCall& gemm) {
    gemm.use_packed_weight(calls.sizes(i, out_features, in_features, group_size));
    use_norm(norm, gemm);
  });
  const std::span<GemmCall* const> gemms = calls.gemms;
  norm.op.check(!gated || (gemms.size() == 2 && gemms[0]->problem.n == gemms[1]->problem.n),
                "gated needs two weights with equally many rows", "Pass those of gate and up");
  Tensor sum = norm.make_sum();
  gemm::Problem problem = gemms[0]->problem;
  gemm::Arguments arguments = gemms[0]->arguments;
  problem.gated = gated;
  if (add_norm(norm, problem, arguments)) {
    if (auto ys = GemmCall::run_fused(gemms, problem, arguments)) {
      ys->push_back(sum);
      return std::move(*ys);
    }
  }
  const Tensor normed = values(norm.op, norm.problem, norm.arguments, norm.x);
  for (GemmCall* gemm : gemms) use_normed(normed, *gemm);
  problem = gemms[0]->problem;
  problem.gated = gated;
  auto fused = GemmCall::run_fused(gemms, problem, gemms[0]->arguments);
  Tensors ys = fused ? std::move(*fused) : GemmCall::run_merged(gemms);
  if (gated && !fused) {
    const int64_t n = gemms[0]->problem.n;
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
