// Attention of few tokens over a key-value cache: y = softmax(scale q kᵀ + mask) v. C++ API.
//
// csrc/ops/attention.cpp is the only caller in qao. The CPU takes the same structs (csrc/cpu/attention.h).
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::attention {

enum class Mask : int { kNone, kBool, kFloat };

// A mask value below it counts as -infinity, so that keys masked by the least float of a dtype are not read.
constexpr float lowest_mask(Mask mask, DType dtype) {
  return mask == Mask::kFloat && dtype == DType::kFloat16 ? -65503.0f : -1e30f;
}

struct Problem {
  int64_t batch = 0, heads = 0, kv_heads = 0, queries = 0, keys = 0;
  int64_t size = 0, value_size = 0;  // of a head, in q and k, and in v
  DType dtype = DType::kBFloat16;
  Mask mask = Mask::kNone;
  DType mask_dtype = DType::kBFloat16;
  float scale = 1;
};

// Strides are in elements. The last dimension of q, k and v is contiguous.
struct Arguments {
  const void *q = nullptr, *k = nullptr, *v = nullptr, *mask = nullptr;
  int64_t q_strides[3] = {};     // batch, head, query
  int64_t k_strides[3] = {};     // batch, head, key
  int64_t v_strides[3] = {};     // batch, head, key
  int64_t mask_strides[4] = {};  // batch, head, query, key; 0 if broadcast
  void* y = nullptr;             // [batch, queries, heads, value_size], contiguous
};

// What a GPU takes: bfloat16 and float16, head sizes that are multiples of kSizeStep up to kMostSize, and addresses and
// strides of q, k and v that are multiples of kAlignment bytes.
constexpr int64_t kSizeStep = 8, kMostSize = 256, kAlignment = 16;

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph. The same
// bits in every run.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::attention
