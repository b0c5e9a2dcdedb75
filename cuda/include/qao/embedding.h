// Rows of a quantised weight: out[m, k] = W[ids[m], k], in a float dtype. The same numbers, bit for bit, as
// dequantising all of W. The C++ API; csrc/embedding.cpp is its only caller in qao, and nothing here knows torch.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::embedding {

struct Problem {
  int64_t m = 0;                  // ids
  int64_t n = 0;                  // rows of W (num_embeddings)
  int64_t k = 0;                  // columns of W (embedding_dim)
  Format weight = Format::kInt4;  // kInt4: packed (cuda/int4/layout.h); kInt8: row-major
  int64_t group_size = 0;         // int4: 32, 64, 128, 256 or k
  bool has_zeros = false;         // int4: the scales tensor also holds zero points
  bool one_scale = false;         // int8: one scale for all of W instead of one a row
  bool wide_ids = false;          // ids are int64, else int32
  DType scale_dtype = DType::kFloat32;
  DType out_dtype = DType::kBFloat16;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct Arguments {
  const void* ids = nullptr;        // [m] int32 or int64
  const uint8_t* weight = nullptr;  // int4: [ceil(n/16), ceil(k/64), 512]; int8: [n, k]
  const void* scales = nullptr;     // int4: [ceil(n/16), groups, has_zeros ? 2 : 1, 16]; int8: [n] or [1]
  void* out = nullptr;              // [m, k] of out_dtype, contiguous, is written
};

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph. The host
// never sees the ids: one outside 0..n-1 reads nothing and gives a row of NaN.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::embedding
