// Builder for a GEMM call of several weights and one x.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "ops/gemm_call.h"

namespace qao {

using Tensors = std::vector<Tensor>;
using Optionals = std::vector<std::optional<Tensor>>;

// One call per weight, each with its own error message.
struct Calls {
  // `scales`: null for weights that hold them themselves.
  Calls(const char* name, const Tensor& x, const Tensors& weights, const Tensors* scales, const Optionals& biases,
        const Optionals* sums = nullptr)
      : x(x), weights(weights), scales(scales), biases(biases), sums(sums) {
    const size_t count = weights.size();
    const bool fits = count >= 1 && (scales == nullptr || scales->size() == count) && biases.size() == count &&
                      (sums == nullptr || sums->size() == count);
    Call(name, x).op.check(fits, "the lists of tensors must have one length, at least 1",
                           "Pass one tensor or None per weight");
    for (size_t i = 0; i < count; ++i) {
      Call& call = *calls.emplace_back(std::make_unique<Call>(name, x));
      call.op.involve("index of the weight", static_cast<int64_t>(i));
    }
  }

  // Calls use(i, gemm) for the product of every weight.
  template <typename Use>
  void prepare(const Use& use) {
    for (size_t i = 0; i < calls.size(); ++i) {
      Call& call = *calls[i];
      const Tensor* own = scales == nullptr ? nullptr : &(*scales)[i];
      owners.push_back(std::make_unique<GemmCall>(call.op, call.x, weights[i], own, biases[i]));
      if (sums != nullptr) owners.back()->add_weight_sums((*sums)[i]);
      use(i, *owners.back());
      gemms.push_back(owners.back().get());
    }
  }
  // The same, and runs them.
  template <typename Use>
  Tensors run(const Use& use) {
    prepare(use);
    return GemmCall::run_merged(gemms);
  }

  // Sizes of packed weight i; `out_features` is empty if they are to be inferred.
  PackedSizes sizes(size_t i, const std::vector<int64_t>& out_features, int64_t in_features, int64_t group_size) const {
    calls[i]->op.check(out_features.empty() || out_features.size() == calls.size(),
                       "out_features must have one number per weight, or none", "Pass the N of every weight");
    return {out_features.empty() ? 0 : out_features[i], in_features, group_size};
  }

  const Tensor& x;
  const Tensors& weights;
  const Tensors* scales;
  const Optionals& biases;
  const Optionals* sums;
  std::vector<std::unique_ptr<Call>> calls;
  std::vector<GemmCall*> gemms;

 private:
  std::vector<std::unique_ptr<GemmCall>> owners;
};

}  // namespace qao
