// MoE routing around grouped GEMMs: top-k selection, permute and unpermute. C++ API.
//
// A slot is one of a token's top_k choices, with index token * top_k + choice. csrc/ops/moe.cpp is the only caller.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::experts {

// MoE permute: stable sort of the slots by expert. Slots with an invalid expert come last.
struct Sort {
  int64_t slots = 0, top_k = 1, experts = 0;
  bool wide = true;              // chosen is int64 instead of int32
  const void* chosen = nullptr;  // [slots] experts
  int32_t* offsets = nullptr;    // [experts] sorted position after the expert's last slot
  int32_t* row_index = nullptr;  // [slots] token of the slot at a sorted position
  int32_t* places = nullptr;     // [slots] sorted position of a slot
  void* workspace = nullptr;     // workspace_bytes(sort)
};

enum class Scores : int { kSoftmax = 0, kSigmoid = 1 };

// The top_k experts of each token in descending order, ties by lower index, and their weights. Weights are scores of
// the logits, divided by their sum if `normalized`, times `factor`. Selection ranks scores plus bias. With several
// groups (runs of consecutive experts), it is limited to the `top_groups` groups with the largest sum of their two best
// experts.
struct TopK {
  int64_t tokens = 0, top_k = 1;
  int experts = 0;
  int groups = 1, top_groups = 1;
  Scores scores = Scores::kSoftmax;
  bool normalized = false;
  float factor = 1;
  DType logits_dtype = DType::kFloat32, bias_dtype = DType::kFloat32;
  const void* logits = nullptr;  // [tokens, experts] of logits_dtype
  const void* bias = nullptr;    // [experts] of bias_dtype, or null
  int64_t* chosen = nullptr;     // [tokens, top_k]
  float* weights = nullptr;      // [tokens, top_k]
};
constexpr float kLeastSum = 1e-20f;  // lower bound of the divisor, as in the models

// MoE unpermute: y[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once.
struct Sum {
  int64_t tokens = 0, top_k = 1;
  int64_t count = 0, columns = 0;  // of rows
  DType dtype = DType::kBFloat16, weights_dtype = DType::kFloat32;
  const void* rows = nullptr;       // [count, columns] of dtype, contiguous
  const int32_t* places = nullptr;  // [tokens, top_k]
  const void* weights = nullptr;    // [tokens, top_k] of weights_dtype
  void* y = nullptr;                // [tokens, columns] of dtype
};

// Enqueued on `stream` (a cudaStream_t) of the current device; safe to capture in a CUDA graph. A place outside `rows`
// counts as zeros.
int64_t workspace_bytes(const Sort& sort);
Status launch(const Sort& sort, void* stream);
Status launch(const TopK& top_k, void* stream);
Status launch(const Sum& sum, void* stream);

}  // namespace qao::experts
