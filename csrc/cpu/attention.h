// Attention of few tokens over a key-value cache, on the CPU. No torch headers.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::cpu {

struct AttentionProblem {
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0;
  int64_t size = 0, value_size = 0;  // of a head, in q and k, and in v
  DType dtype = DType::kBFloat16;
  enum class Mask { kNone, kBool, kFloat } mask = Mask::kNone;
  DType mask_dtype = DType::kBFloat16;
  float scale = 1;
};

// Strides are in elements. The last dimension of q, k and v is contiguous.
struct AttentionArguments {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *mask = nullptr;
  int64_t q_strides[3] = {};     // batch, head, query
  int64_t k_strides[3] = {};     // batch, head, key
  int64_t v_strides[3] = {};     // batch, head, key
  int64_t mask_strides[4] = {};  // batch, head, query, key; 0 if broadcast
  void* y = nullptr;             // [batch, queries, heads, value_size], contiguous
};

// y = softmax(scale q kᵀ + mask) v, in float32. The bits do not depend on the number of threads.
Status attention(const AttentionProblem& problem, const AttentionArguments& arguments, const Threads& threads);

}  // namespace qao::cpu
