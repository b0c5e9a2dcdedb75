// Operators of GGUF weights: GEMM, grouped GEMM, dequantization and embedding lookup.
#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "cpu/features.h"
#include "cpu/numeric.h"
#include "ops/gguf_operands.h"
#include "ops/grouped_gemm_call.h"
#include "ops/merged_gemm_call.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

using cpu::gguf::Weight;

// Rows of x from which W in floats and torch's GEMM are faster than the scalar kernel.
constexpr int64_t kManyRows = 128;
constexpr int64_t kSlabValues = int64_t{1} << 21;  // of W in floats at a time: they stay in the L2 or L3 cache

// Whether W in floats and torch's GEMM are faster than the kernel.
bool is_dense(const Op& op, const gemm::Problem& problem) {
  cpu::Features features;
  op.check(cpu::selected_features(&features));
  return !cpu::includes(features, cpu::kAvx2) && problem.m >= kManyRows && !problem.batch_invariant &&
         problem.x_dtype != DType::kFloat16;
}

// y = x · Wᵀ + bias with rows of W in the dtype of x.
Tensor run_dense(const Call& call, const Tensor& x, GemmCall& gemm) {
  Tensor y = gemm.make_y();
  const auto& problem = gemm.problem;
  const auto& arguments = gemm.arguments;
  const int64_t n = problem.n, rows = std::min(n, std::max<int64_t>(kSlabValues / problem.k, 16));
  const auto [columns, bytes] = cpu::gguf::block_size(problem.gguf_type);
  Weight w;
  w.type = problem.gguf_type, w.k = problem.k;
  w.weight = static_cast<const uint8_t*>(arguments.weight);
  w.dtype = problem.x_dtype;
  std::optional<Tensor> slab;
  for (int64_t first = 0; first < n; first += rows, w.weight += rows * (w.k / columns * bytes)) {
    w.n = std::min(rows, n - first);
    if (first == 0 || w.n < rows) slab = empty({w.n, w.k}, torch_dtype(w.dtype), call.x);
    w.out = slab->data_ptr();
    call.op.check(cpu::gguf::dequantize(w, torch_threads(w.n * w.k)));
    const Tensor part = torch::stable::matmul(x, torch::stable::transpose(*slab, 0, 1));
    const void* values = part.data_ptr();
    cpu::split(torch_threads(problem.m * w.n), problem.m, [&](int64_t begin, int64_t end) {
      for (int64_t m = begin; m < end; ++m) {
        for (int64_t i = 0; i < w.n; ++i) {
          float value = cpu::load(values, m * w.n + i, w.dtype);
          if (problem.has_bias) value += cpu::load(arguments.bias, first + i, problem.bias_dtype);
          cpu::store(arguments.y, m * n + first + i, w.dtype, value);
        }
      }
    });
  }
  return y;
}

Tensor gguf_mm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t qtype,
               bool batch_invariant) {
  Call call("gguf_mm", x);
  GemmCall gemm(call.op, call.x, weight, nullptr, bias);
  gemm.use_gguf_weight(qtype);
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
  return is_dense(call.op, gemm.problem) ? run_dense(call, x, gemm) : gemm.run();
}

Tensors merged_gguf_mm(const Tensor& x, Tensors weights, Optionals biases, int64_t qtype) {
  Calls calls("_merged_gguf_mm", x, weights, nullptr, biases);
  calls.prepare([&](size_t, GemmCall& gemm) {
    gemm.use_gguf_weight(qtype);
    gemm.use_float_x(x);
  });
  if (!is_dense(calls.calls[0]->op, calls.gemms[0]->problem)) return GemmCall::run_merged(calls.gemms);
  Tensors ys;
  for (size_t i = 0; i < weights.size(); ++i) ys.push_back(run_dense(*calls.calls[i], x, *calls.gemms[i]));
  return ys;
}

Tensor gguf_grouped_mm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, const Tensor& offsets,
                       const std::optional<Tensor>& row_index, const std::optional<Tensor>& row_scale, int64_t qtype,
                       bool batch_invariant, const GateNumbers& gate) {
  Call call("gguf_grouped_mm", x);
  GroupedGemmCall gemm(call.op, call.x, weight, nullptr, bias, {offsets, row_index, row_scale});
  gemm.use_gguf_weight(qtype);
  gemm.use_float_x(x);
  gemm.problem.batch_invariant = batch_invariant;
  return gemm.run(gate);
}

Tensor dequantize_gguf(const Tensor& weight_tensor, int64_t qtype, torch::headeronly::ScalarType dtype) {
  Op op("dequantize_gguf");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight), op.involve("qtype", qtype);
  Weight rows = checked_gguf_weight(op, weight, weight, qtype);
  rows.dtype = op.float_dtype("dtype", dtype);
  Tensor out = empty({rows.n, rows.k}, torch_dtype(rows.dtype), weight);
  rows.out = out.data_ptr();
  op.check(cpu::gguf::dequantize(rows, torch_threads(rows.n * rows.k)));
  return out;
}

Tensor gguf_embedding(const Tensor& ids_tensor, const Tensor& weight_tensor, int64_t qtype,
                      torch::headeronly::ScalarType dtype) {
  Op op("gguf_embedding");
  const Argument ids("ids", ids_tensor), weight("weight", weight_tensor);
  op.involve(&ids), op.involve(&weight), op.involve("qtype", qtype);
  Weight rows = checked_gguf_weight(op, weight, weight, qtype);
  op.check(ids.dtype() == int64_code() || ids.dtype() == int32_code(), "ids must be int32 or int64",
           "Convert them: ids.long()");
  op.check(ids.same_device(weight), "ids and weight are on different devices",
           "Move them to one device with .to(device)");
  rows.dtype = op.float_dtype("dtype", dtype);
  Tensor out = empty_vectors(rows.k, torch_dtype(rows.dtype), ids);
  const int64_t m = ids.numel();
  if (m == 0) return out;
  std::optional<Tensor> copy;
  const void* data = ids.is_contiguous() ? ids.data() : copy.emplace(contiguous(ids_tensor, ids)).data_ptr();
  rows.out = out.data_ptr();
  op.check(cpu::gguf::embedding(rows, data, ids.dtype() == int64_code(), m, torch_threads(m * rows.k)));
  return out;
}

constexpr Operator kOperators[] = {
    operator_of<"gguf_mm", gguf_mm>(
        "gguf_mm(Tensor x, Tensor weight, Tensor? bias, int qtype, bool batch_invariant=False) -> Tensor"),
    operator_of<"_merged_gguf_mm", merged_gguf_mm>(
        "_merged_gguf_mm(Tensor x, Tensor[] weight, Tensor?[] bias, int qtype) -> Tensor[]"),
    operator_of<"gguf_grouped_mm", gguf_grouped_mm>(
        "gguf_grouped_mm(Tensor x, Tensor weight, Tensor? bias, Tensor offsets, Tensor? row_index, Tensor? row_scale, "
        "int qtype, bool batch_invariant=False, float[]? gate=None) -> Tensor"),
    operator_of<"dequantize_gguf", dequantize_gguf>(
        "dequantize_gguf(Tensor weight, int qtype, ScalarType dtype) -> Tensor"),
    operator_of<"gguf_embedding", gguf_embedding>(
        "gguf_embedding(Tensor ids, Tensor weight, int qtype, ScalarType dtype) -> Tensor"),
};

}  // namespace

Operators gguf_operators() { return kOperators; }

}  // namespace qao
