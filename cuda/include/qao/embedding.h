// Embedding lookup in a quantized weight: out[m, k] = dequantized W[ids[m], k]. C++ API.
//
// Bitwise equal to dequantizing all of W. csrc/ops/embedding.cpp is the only caller in qao.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::embedding {

struct Problem {
  int64_t m = 0;                  // number of ids
  int64_t n = 0;                  // rows of W (num_embeddings)
  int64_t k = 0;                  // columns of W (embedding_dim)
  Format weight = Format::kInt4;  // kInt4: packed (cuda/layout/int4.h); kInt8: row-major
  int64_t group_size = 0;         // int4: 32, 64, 128, 256 or k
  bool has_zeros = false;         // int4: the scales tensor also holds zero points
  bool one_scale = false;         // int8: one scale for all of W instead of one per row
  bool wide_ids = false;          // ids are int64 instead of int32
  DType scale_dtype = DType::kFloat32;
  DType out_dtype = DType::kBFloat16;

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct Arguments {
  const void* ids = nullptr;        // [m] int32 or int64
  const uint8_t* weight = nullptr;  // int4: [ceil(n/16), ceil(k/64), 512]; int8: [n, k]
  const void* scales = nullptr;     // int4: [ceil(n/16), groups, has_zeros ? 2 : 1, 16]; int8: [n] or [1]
  void* out = nullptr;              // output: [m, k] of out_dtype, contiguous
};

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous; safe to capture in a CUDA graph. An id
// outside 0..n-1 is not read and gives a row of NaN, since the host never sees the ids.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::embedding
