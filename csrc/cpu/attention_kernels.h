// Attention of the queries of one key-value head over a chunk of keys, implemented per instruction set.
// Files compiled for one of them include this header, so it declares and never defines (gemm/job.h explains why).
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::cpu {

constexpr int64_t kChunkKeys = 128;  // keys of a chunk
constexpr int kRowBlock = 4;         // rows that read a key together

// The rows are the queries of all heads that share the key-value head: row h * queries + i is query i of head h.
struct AttentionChunk {
  int64_t rows = 0, queries = 0, keys = 0;
  int64_t size = 0, value_size = 0;
  DType dtype = DType::kBFloat16;
  const void *q = nullptr, *k = nullptr, *v = nullptr;  // of the first row; of the chunk's first key
  int64_t q_head_stride = 0, q_stride = 0, k_stride = 0, v_stride = 0;
  float scale = 1;
  // Added to scores: row i of `mask_rows` rows serves the rows i, i + mask_rows, ... Null: nothing.
  const void* mask = nullptr;
  bool bool_mask = false;  // bytes: nonzero keys count
  DType mask_dtype = DType::kBFloat16;
  int64_t mask_rows = 0, mask_head_stride = 0, mask_stride = 0, mask_key_stride = 0;
  float lowest = 0;  // keys with a smaller mask are left out
  // Output by row: the largest score, the sum of exp(score - largest), and the sum of those times v,
  // [rows][value_size].
  float *largest = nullptr, *sums = nullptr, *values = nullptr;
  float* memory = nullptr;  // chunk_floats() of the kernels
};

struct AttentionKernels {
  // Float32 values of memory that a chunk of `rows` rows needs.
  int64_t (*floats)(int64_t rows, int64_t mask_rows, int64_t size);
  // Without a key that counts: largest -infinity, sums and values 0.
  void (*chunk)(const AttentionChunk& chunk);
};

namespace scalar {
extern const AttentionKernels kAttention;
}
namespace avx2 {
extern const AttentionKernels kAttention;
}
namespace avx512 {
extern const AttentionKernels kAttention;
}

}  // namespace qao::cpu
