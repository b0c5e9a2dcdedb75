// Operators of GGUF weights: GEMM, dequantization and embedding lookup.
#include "cpu/gguf.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "cpu/features.h"
#include "cpu/gemm/driver.h"
#include "cpu/numeric.h"
#include "stable_abi/operators.h"
#include "stable_abi/rows.h"

namespace qao {
namespace {

using cpu::gguf::Weight;

// Checks a weight [N, row_bytes] of a GGUF type, on the device of `ids_or_x`.
Weight checked_weight(const Op& op, const Argument& weight, const Argument& other, int64_t qtype) {
  const auto [columns, bytes] = cpu::gguf::block_size(qtype);
  op.check(bytes > 0,
           "qtype must be ggml's number of Q4_0 (2), Q4_1 (3), Q5_0 (6), Q5_1 (7), Q8_0 (8), Q2_K (10), Q3_K (11), "
           "Q4_K (12), Q5_K (13), Q6_K (14), IQ4_NL (20) or IQ4_XS (23)",
           "Dequantize other types with the gguf package, and quantize the weight again");
  op.check(weight.dtype() == uint8_code() && weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) >= 1,
           "weight must be uint8 of shape [N, bytes of a row]", "Pass the tensor's bytes as the GGUF file holds them");
  if (weight.size(1) % bytes != 0) {
    op.fail("rows of weight must hold whole blocks of " + std::to_string(bytes) + " bytes",
            "Pass the qtype that the GGUF file records for this tensor");
  }
  op.check_operand(weight, other);
  if (!weight.is_cpu()) {
    op.fail(
        "GGUF weights have kernels for CPUs only",
        "Move the tensors to the CPU, or load the file for the GPU: qao.from_pretrained(path, device_map=\"cuda\")");
  }
  Weight rows;
  rows.type = qtype;
  rows.n = weight.size(0);
  rows.k = weight.size(1) / bytes * columns;
  rows.weight = static_cast<const uint8_t*>(weight.data());
  return rows;
}

// Rows of x from which W in floats and torch's GEMM are faster than the scalar kernel.
constexpr int64_t kManyRows = 128;
constexpr int64_t kSlabValues = int64_t{1} << 21;  // of W in floats at a time: they stay in the L2 or L3 cache

// y = x · Wᵀ + bias with rows of W in the dtype of x.
void dense_mm(const Op& op, const Tensor& x, Weight w, const gemm::Problem& problem, const gemm::Arguments& arguments,
              const Argument& like) {
  const int64_t row_bytes = w.k / cpu::gguf::block_size(w.type).columns * cpu::gguf::block_size(w.type).bytes;
  const int64_t rows = std::min(w.n, std::max<int64_t>(kSlabValues / w.k, 16)), n = w.n;
  std::optional<Tensor> slab;
  w.dtype = problem.x_dtype;
  for (int64_t first = 0; first < n; first += rows, w.weight += rows * row_bytes) {
    w.n = std::min(rows, n - first);
    if (first == 0 || w.n < rows) slab = empty({w.n, w.k}, torch_dtype(w.dtype), like);
    w.out = slab->data_ptr();
    op.check(cpu::gguf::dequantize(w, torch_threads(w.n * w.k)));
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
}

// One GEMM of x and a weight, with its results allocated.
struct GgufCall {
  GgufCall(const char* name, const Tensor& x_tensor, const Tensor& weight_tensor,
           const std::optional<Tensor>& bias_tensor, int64_t qtype, bool batch_invariant, int64_t index = -1)
      : op(name), x("x", x_tensor), weight("weight", weight_tensor) {
    op.involve(&x), op.involve(&weight);
    if (bias_tensor) op.involve(&bias.emplace("bias", *bias_tensor));
    op.involve("qtype", qtype);
    if (index >= 0) op.involve("index of the weight", index);
    gemm::Problem& problem = gemm.problem;
    gemm::Arguments& arguments = gemm.arguments;
    problem.x_dtype = problem.y_dtype = op.float_dtype(x);
    w = checked_weight(op, weight, x, qtype);
    problem.weight = Format::kGguf;
    problem.gguf_type = static_cast<int>(qtype);
    problem.n = w.n, problem.k = w.k;
    problem.batch_invariant = batch_invariant;
    arguments.weight = w.weight;
    op.check(x.dim() >= 1 && x.size(x.dim() - 1) == w.k, "x must have shape [..., in_features]",
             "Check x.shape against the layer's in_features: blocks per row times columns per block");
    if (bias) {
      problem.has_bias = true;
      problem.bias_dtype = op.check_bias(*bias, x, w.n);
      arguments.bias = bias->data();
    }
    rows.emplace(x_tensor, x);
    problem.m = rows->count;
    arguments.x = rows->data, arguments.x_stride = rows->stride;
    y.emplace(empty_rows(w.n, torch_dtype(problem.y_dtype), x));
    arguments.y = y->data_ptr();
  }
  GgufCall(const GgufCall&) = delete;  // op points to the arguments

  int64_t work() const { return gemm.problem.m * gemm.problem.n * gemm.problem.k; }
  // Whether W in floats and torch's GEMM are faster than the kernel.
  bool is_dense() const {
    cpu::Features features;
    op.check(cpu::selected_features(&features));
    return !cpu::includes(features, cpu::kAvx2) && gemm.problem.m >= kManyRows && !gemm.problem.batch_invariant &&
           gemm.problem.x_dtype != DType::kFloat16;
  }

  Op op;
  Argument x, weight;
  std::optional<Argument> bias;
  Weight w;
  std::optional<Rows> rows;
  cpu::Gemm gemm;
  std::optional<Tensor> y;
};

Tensor gguf_mm(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t qtype,
               bool batch_invariant) {
  GgufCall call("gguf_mm", x, weight, bias, qtype, batch_invariant);
  const auto& [problem, arguments] = call.gemm;
  if (problem.m == 0) return *call.y;
  if (call.is_dense()) {
    dense_mm(call.op, x, call.w, problem, arguments, call.x);
  } else {
    call.op.check(cpu::gemm(problem, arguments, torch_threads(call.work())));
  }
  return *call.y;
}

std::vector<Tensor> merged_gguf_mm(const Tensor& x, std::vector<Tensor> weight, std::vector<std::optional<Tensor>> bias,
                                   int64_t qtype) {
  constexpr const char* kName = "_merged_gguf_mm";
  Op(kName).check(!weight.empty() && weight.size() == bias.size(),
                  "weight and bias must be lists of one length, at least 1", "Pass one tensor or None per weight");
  std::vector<std::unique_ptr<GgufCall>> calls;
  std::vector<cpu::Gemm> gemms;
  std::vector<Tensor> ys;
  int64_t work = 0;
  for (size_t i = 0; i < weight.size(); ++i) {
    const auto index = static_cast<int64_t>(i);
    calls.push_back(std::make_unique<GgufCall>(kName, x, weight[i], bias[i], qtype, false, index));
    const GgufCall& call = *calls.back();
    gemms.push_back(call.gemm);
    ys.push_back(*call.y);
    work += call.work();
  }
  const GgufCall& first = *calls[0];
  if (first.gemm.problem.m == 0) return ys;
  if (!first.is_dense()) {
    first.op.check(cpu::gemm(gemms, torch_threads(work)));
    return ys;
  }
  for (const auto& one : calls) dense_mm(one->op, x, one->w, one->gemm.problem, one->gemm.arguments, one->x);
  return ys;
}

Tensor dequantize_gguf(const Tensor& weight_tensor, int64_t qtype, torch::headeronly::ScalarType dtype) {
  Op op("dequantize_gguf");
  const Argument weight("weight", weight_tensor);
  op.involve(&weight), op.involve("qtype", qtype);
  Weight rows = checked_weight(op, weight, weight, qtype);
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
  Weight rows = checked_weight(op, weight, weight, qtype);
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
    operator_of<"dequantize_gguf", dequantize_gguf>(
        "dequantize_gguf(Tensor weight, int qtype, ScalarType dtype) -> Tensor"),
    operator_of<"gguf_embedding", gguf_embedding>(
        "gguf_embedding(Tensor ids, Tensor weight, int qtype, ScalarType dtype) -> Tensor"),
};

}  // namespace

Operators gguf_operators() { return kOperators; }

}  // namespace qao
