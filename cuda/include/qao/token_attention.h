// Attention of one token per sequence over a static cache: rotary embedding of q and k, write of k and v to the cache,
// and y = softmax(scale q kᵀ + mask) v. C++ API.
//
// csrc/ops/token_attention.cpp is the only caller in qao. The CPU takes the same structs (csrc/cpu/token_attention.h).
#pragma once

#include <cstdint>

#include "qao/attention.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::attention {

// A mask [batch, keys] that all heads share. Strides are in elements.
struct KeyMask {
  Mask kind = Mask::kNone;
  DType dtype = DType::kBFloat16;
  const void* data = nullptr;
  int64_t batch_stride = 0, key_stride = 0;
};

// Which keys of a sequence a mask counts.
struct KeyRange {
  int32_t begin, end;  // the keys from `begin` to `end` - 1 contain all that count
  int32_t plain;       // 1: all of these count, and the mask adds 0 to their scores
  int32_t finite;      // 1: the mask excludes every key, by finite values, which then count
};

struct TokenProblem {
  int64_t batch = 0, heads = 0, kv_heads = 0, keys = 0;
  int64_t size = 0;  // of a head
  DType dtype = DType::kBFloat16;
  float scale = 1;
};

// Strides are in elements. Elements of a head are contiguous.
struct TokenArguments {
  const void *q = nullptr, *k = nullptr, *v = nullptr;
  int64_t q_strides[2] = {}, k_strides[2] = {}, v_strides[2] = {};  // batch, head
  const void *cos = nullptr, *sin = nullptr;  // of all elements of a head; null: q and k are rotated already
  int64_t cos_stride = 0, sin_stride = 0;     // batch
  const int64_t* position = nullptr;          // [1]: of the new key; beyond the cache, nothing is written
  void *key_cache = nullptr, *value_cache = nullptr;
  int64_t key_strides[3] = {}, value_strides[3] = {};  // batch, head, key
  KeyMask mask;
  const KeyRange* ranges = nullptr;  // of the mask, which launch_key_range() finds
  int64_t range_stride = 0;          // batch
  void* y = nullptr;                 // [batch, heads, size], contiguous
};

// What a GPU takes, from sm_90 on: bfloat16 and float16, heads of these sizes, groups of up to kMostGroup query heads
// for each key-value head, and addresses and strides that are multiples of kAlignment bytes.
constexpr bool has_token_kernel(int64_t size) { return size == 64 || size == 128; }
constexpr int64_t kMostGroup = 8;

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph. The same
// bits in every run.
Status launch_token(const TokenProblem& problem, const TokenArguments& arguments, void* stream);
Status launch_key_range(const KeyMask& mask, int64_t batch, int64_t keys, KeyRange* ranges, void* stream);

}  // namespace qao::attention
