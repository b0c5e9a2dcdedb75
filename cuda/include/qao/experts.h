// What stands around products of experts (qao/grouped_mm.h): which rows they have, and the way back. A slot is one of a
// token's top_k choices, number token * top_k + choice. The C++ API; csrc/experts.cpp is its only caller.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::experts {

// Slots in the order of their experts, those of one expert as they were. Numbers that are no expert come last.
struct Sort {
  int64_t slots = 0, top_k = 1, experts = 0;
  bool wide = true;              // chosen is int64, else int32
  const void* chosen = nullptr;  // [slots] numbers of experts
  int32_t* offsets = nullptr;    // [experts] the place after an expert's last slot
  int32_t* row_index = nullptr;  // [slots] the token of the slot at a place
  int32_t* places = nullptr;     // [slots] the place of a slot
  void* workspace = nullptr;     // workspace_bytes(sort)
};

enum class Scores : int { kSoftmax = 0, kSigmoid = 1 };

// The top_k experts of each token, the best first and of equal ones that of the lowest number, and their weights: the
// scores of the logits, over their sum if `normalized`, times `factor`. Which are best is a matter of scores plus
// bias. With several groups, runs of experts, it is so within the `top_groups` whose best two add up to the most.
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
constexpr float kLeastSum = 1e-20f;  // what scores of zero are divided by, as models do

// y[t] = sum over j of weights[t, j] * rows[places[t, j]], in float32, rounded once.
struct Sum {
  int64_t tokens = 0, top_k = 1;
  int64_t count = 0, columns = 0;  // of rows
  DType dtype = DType::kBFloat16, weights_dtype = DType::kFloat32;
  const void* rows = nullptr;       // [count, columns] of dtype, contiguous
  const int32_t* places = nullptr;  // [tokens, top_k]
  const void* weights = nullptr;    // [tokens, top_k] of weights_dtype
  void* y = nullptr;                // [tokens, columns] of dtype
};

// Enqueued on `stream` (a cudaStream_t) of the current device; safe to capture in a CUDA graph. A place that is no row
// counts as zeros.
int64_t workspace_bytes(const Sort& sort);
Status launch(const Sort& sort, void* stream);
Status launch(const TopK& top_k, void* stream);
Status launch(const Sum& sum, void* stream);

}  // namespace qao::experts
