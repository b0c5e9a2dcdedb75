// MoE operators: top-k selection, permute (expert_sort) and unpermute (expert_sum).
#include "qao/moe.h"

#include "cpu/moe.h"
#include "stable_abi/operators.h"

namespace qao {
namespace {

std::tuple<Tensor, Tensor, Tensor> expert_sort(const Tensor& experts_tensor, int64_t num_experts) {
  Op op("expert_sort");
  const Argument chosen("experts", experts_tensor);
  op.involve(&chosen);
  op.involve("num_experts", num_experts);
  experts::Sort sort;
  sort.wide = chosen.dtype() == int64_code();
  op.check((sort.wide || chosen.dtype() == int32_code()) && chosen.dim() == 2,
           "experts must be int64 or int32 of shape [tokens, top_k]", "Pass the experts that the router chose");
  op.check(num_experts >= 1 && num_experts < int64_t{1} << 24, "num_experts must be from 1 to 2^24",
           "Pass the number of experts that have weights here");
  sort.slots = chosen.numel();
  op.check(sort.slots < int64_t{1} << 31, "there must be fewer than 2^31 numbers", "Pass fewer tokens at a time");
  sort.top_k = chosen.size(1), sort.experts = num_experts;
  Tensor offsets = empty({num_experts}, int32_code(), chosen), row_index = empty({sort.slots}, int32_code(), chosen),
         places = empty({chosen.size(0), sort.top_k}, int32_code(), chosen);
  std::optional<Tensor> copy;
  sort.chosen = chosen.is_contiguous() ? chosen.data() : copy.emplace(contiguous(experts_tensor, chosen)).data_ptr();
  sort.offsets = static_cast<int32_t*>(offsets.data_ptr());
  sort.row_index = static_cast<int32_t*>(row_index.data_ptr());
  sort.places = static_cast<int32_t*>(places.data_ptr());
  if (chosen.is_cpu()) {
    cpu::sort(sort);
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(chosen);
    std::optional<Tensor> workspace;
    if (const int64_t bytes = experts::workspace_bytes(sort); bytes > 0) {
      sort.workspace = workspace.emplace(empty({bytes}, uint8_code(), chosen)).data_ptr();
    }
    op.check(experts::launch(sort, current_stream(chosen)));
#else
    op.fail_without_cuda();
#endif
  }
  return {offsets, row_index, places};
}

std::tuple<Tensor, Tensor> expert_topk(const Tensor& logits_tensor, const std::optional<Tensor>& bias_tensor,
                                       int64_t top_k, bool sigmoid, bool normalized, double factor, int64_t groups,
                                       int64_t top_groups) {
  Op op("expert_topk");
  const Argument logits("logits", logits_tensor);
  op.involve(&logits);
  std::optional<Argument> bias;
  if (bias_tensor) op.involve(&bias.emplace("bias", *bias_tensor));
  op.involve("top_k", top_k), op.involve("groups", groups), op.involve("top_groups", top_groups);
  experts::TopK choice;
  choice.logits_dtype = op.float_dtype(logits);
  op.check(logits.dim() == 2 && logits.size(1) >= 1 && logits.size(1) < int64_t{1} << 24,
           "logits must have shape [tokens, experts]", "Pass the router's logits, flattened");
  choice.tokens = logits.size(0), choice.experts = static_cast<int>(logits.size(1));
  op.check(groups >= 1 && groups <= 32 && logits.size(1) % groups == 0 && top_groups >= 1 && top_groups <= groups,
           "experts must be as many in each of up to 32 groups, of which top_groups are chosen",
           "Pass 1 and 1 for a choice among all");
  op.check(top_k >= 1 && top_k <= top_groups * (logits.size(1) / groups),
           "top_k must be from 1 to the number of experts in the chosen groups", "Choose fewer");
  if (bias) {
    choice.bias_dtype = op.float_dtype(*bias);
    op.check(bias->has_shape({logits.size(1)}), "bias must have one number for each expert", "Check its shape");
    op.check_operand(*bias, logits);
    choice.bias = bias->data();
  }
  choice.top_k = top_k;
  choice.groups = static_cast<int>(groups), choice.top_groups = static_cast<int>(top_groups);
  choice.scores = sigmoid ? experts::Scores::kSigmoid : experts::Scores::kSoftmax;
  choice.normalized = normalized, choice.factor = static_cast<float>(factor);
  Tensor chosen = empty({choice.tokens, top_k}, int64_code(), logits),
         weights = empty({choice.tokens, top_k}, float32_code(), logits);
  if (choice.tokens == 0) return {chosen, weights};
  std::optional<Tensor> copy;
  choice.logits = logits.is_contiguous() ? logits.data() : copy.emplace(contiguous(logits_tensor, logits)).data_ptr();
  choice.chosen = static_cast<int64_t*>(chosen.data_ptr());
  choice.weights = static_cast<float*>(weights.data_ptr());
  if (logits.is_cpu()) {
    cpu::choose(choice, torch_threads(choice.tokens * choice.experts * top_k));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(logits);
    op.check(experts::launch(choice, current_stream(logits)));
#else
    op.fail_without_cuda();
#endif
  }
  return {chosen, weights};
}

Tensor expert_sum(const Tensor& rows_tensor, const Tensor& places_tensor, const Tensor& weights_tensor) {
  Op op("expert_sum");
  const Argument rows("rows", rows_tensor), places("places", places_tensor), weights("weights", weights_tensor);
  op.involve(&rows), op.involve(&places), op.involve(&weights);
  experts::Sum sum;
  sum.dtype = op.float_dtype(rows), sum.weights_dtype = op.float_dtype(weights);
  op.check(rows.dim() == 2 && rows.size(1) >= 1 && rows.size(0) < int64_t{1} << 31 && rows.size(1) < int64_t{1} << 26,
           "rows must have shape [places, columns]", "Pass the result of the experts' last GEMM");
  op.check(places.dtype() == int32_code() && places.dim() == 2, "places must be int32 of shape [tokens, top_k]",
           "Pass the places of expert_sort");
  op.check(weights.has_shape({places.size(0), places.size(1)}), "weights must have the shape of places",
           "Pass the router's weights of the same experts");
  for (const Argument* operand : {&rows, &places, &weights}) op.check_operand(*operand, rows);
  sum.tokens = places.size(0), sum.top_k = places.size(1);
  sum.count = rows.size(0), sum.columns = rows.size(1);
  sum.rows = rows.data(), sum.places = static_cast<const int32_t*>(places.data()), sum.weights = weights.data();
  Tensor y = empty({sum.tokens, sum.columns}, rows.dtype(), rows);
  if (sum.tokens == 0) return y;
  sum.y = y.data_ptr();
  if (rows.is_cpu()) {
    op.check(cpu::sum(sum, torch_threads(sum.tokens * sum.top_k * sum.columns)));
  } else {
#if defined(QAO_WITH_CUDA)
    const DeviceScope scope(rows);
    op.check(experts::launch(sum, current_stream(rows)));
#else
    op.fail_without_cuda();
#endif
  }
  return y;
}

constexpr Operator kOperators[] = {
    operator_of<"expert_sort", expert_sort>("expert_sort(Tensor experts, int num_experts) -> (Tensor, Tensor, Tensor)"),
    operator_of<"expert_topk", expert_topk>(
        "expert_topk(Tensor logits, Tensor? bias, int top_k, bool sigmoid, bool normalized, float factor, "
        "int groups=1, int top_groups=1) -> (Tensor, Tensor)"),
    operator_of<"expert_sum", expert_sum>("expert_sum(Tensor rows, Tensor places, Tensor weights) -> Tensor"),
};

}  // namespace

Operators expert_operators() { return kOperators; }

}  // namespace qao
