// Embedding operators of int4 and int8 weights.
#include "qao/embedding.h"

#include "cpu/embedding.h"
#include "ops/int4_operands.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

using embedding::Arguments;
using embedding::Problem;

// Checks ids [...] and dtype, and runs the lookup into [..., k]. `problem` and `arguments` hold the weight.
Tensor gather(const Op& op, const Argument& ids, const Tensor& ids_tensor, const Argument& weight, Problem& problem,
              Arguments& arguments, torch::headeronly::ScalarType dtype) {
  op.check(ids.dtype() == int64_code() || ids.dtype() == int32_code(), "ids must be int32 or int64",
           "Convert them: ids.long()");
  op.check(ids.same_device(weight), "ids and weight are on different devices",
           "Move them to one device with .to(device)");
  problem.m = ids.numel();
  problem.wide_ids = ids.dtype() == int64_code();
  problem.out_dtype = op.float_dtype("dtype", dtype);
  Tensor out = empty_vectors(problem.k, torch_dtype(problem.out_dtype), ids);
  if (problem.m == 0) return out;
  std::optional<Tensor> copy;
  arguments.ids = ids.is_contiguous() ? ids.data() : copy.emplace(contiguous(ids_tensor, ids)).data_ptr();
  arguments.weight = static_cast<const uint8_t*>(weight.data());
  arguments.out = out.data_ptr();
  if (weight.is_cpu()) {
    op.check(cpu::embedding(problem, arguments, torch_threads(problem.m * problem.k)));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(weight);
    op.check(embedding::launch(problem, arguments, current_stream(weight)));
#else
    op.fail_without_cuda();
#endif
  }
  return out;
}

Tensor int4_embedding(const Tensor& ids_tensor, const Tensor& weight_tensor, const Tensor& scales_tensor,
                      int64_t num_embeddings, int64_t embedding_dim, int64_t group_size,
                      torch::headeronly::ScalarType dtype) {
  Op op("int4_embedding");
  const Argument ids("ids", ids_tensor), weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&ids), op.involve(&weight), op.involve(&scales);
  op.involve("num_embeddings", num_embeddings), op.involve("embedding_dim", embedding_dim);
  op.involve("group_size", group_size);
  op.check(num_embeddings >= 1 && embedding_dim >= 1, "num_embeddings and embedding_dim must be at least 1",
           "Pass the N and K of the weight that was packed");
  const int4::Weight packed = checked_packed(op, weight, scales, weight, num_embeddings, embedding_dim, group_size);

  Problem problem;
  problem.n = packed.n;
  problem.k = packed.k;
  problem.group_size = packed.group_size;
  problem.has_zeros = packed.has_zeros;
  problem.scale_dtype = packed.scale_dtype;
  Arguments arguments;
  arguments.scales = scales.data();
  return gather(op, ids, ids_tensor, weight, problem, arguments, dtype);
}

Tensor int8_embedding(const Tensor& ids_tensor, const Tensor& weight_tensor, const Tensor& scales_tensor,
                      torch::headeronly::ScalarType dtype) {
  Op op("int8_embedding");
  const Argument ids("ids", ids_tensor), weight("weight", weight_tensor), scales("scales", scales_tensor);
  op.involve(&ids), op.involve(&weight), op.involve(&scales);
  op.check(weight.dtype() == int8_code() && weight.dim() == 2 && weight.size(0) >= 1 && weight.size(1) >= 1,
           "weight must be int8 of shape [N, K]", "Quantize the weight first");
  Problem problem;
  problem.weight = Format::kInt8;
  problem.n = weight.size(0);
  problem.k = weight.size(1);
  op.check(scales.dtype() == float32_code(), "scales must be float32", "Pass scales.float()");
  problem.one_scale = scales.numel() == 1;
  const bool per_row = scales.numel() == problem.n && (scales.dim() == 1 || scales.size(scales.dim() - 1) == 1);
  op.check(problem.one_scale || per_row, "scales must have shape [N] or [1]",
           "Check scales.shape against weight.shape");
  op.check_operand(weight, weight), op.check_operand(scales, weight);
  Arguments arguments;
  arguments.scales = scales.data();
  return gather(op, ids, ids_tensor, weight, problem, arguments, dtype);
}

constexpr Operator kOperators[] = {
    operator_of<"int4_embedding", int4_embedding>(
        "int4_embedding(Tensor ids, Tensor weight, Tensor scales, int num_embeddings, int embedding_dim, "
        "int group_size, ScalarType dtype) -> Tensor"),
    operator_of<"int8_embedding", int8_embedding>(
        "int8_embedding(Tensor ids, Tensor weight, Tensor scales, ScalarType dtype) -> Tensor"),
};

}  // namespace

Operators embedding_operators() { return kOperators; }

}  // namespace qao
