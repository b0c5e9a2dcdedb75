// GGUF weights on the CPU: rows to floats, and embedding lookup.
#pragma once

#include <cstdint>

#include "cpu/parallel.h"
#include "qao/status.h"
#include "qao/types.h"

namespace qao::cpu::gguf {

// Columns and bytes of a block of this type (ggml's number); {0, 0} for types without kernels.
struct BlockSize {
  int64_t columns, bytes;
};
BlockSize block_size(int64_t type);

// Columns of W with one scale and minimum.
int64_t scale_columns(int64_t type);

// Places of a chunk's segments in packed x (Job::segment_places), [16].
const uint8_t* segment_places(int64_t type);

// Columns [begin, begin + count) of a row of W as float32, count columns; both are multiples of a block's columns.
void dequantize_row(int64_t type, const uint8_t* row, int64_t begin, int64_t count, float* out);

// Rows of W [n, k], in `dtype`: all, or those that `ids` names.
struct Weight {
  int64_t type = 0, n = 0, k = 0;
  const uint8_t* weight = nullptr;
  DType dtype = DType::kFloat32;
  void* out = nullptr;  // [n, k], or [m, k]
};
Status dequantize(const Weight& rows, const Threads& threads);
// Returns an error for an id outside 0..n-1, before writing anything. `wide_ids`: int64 instead of int32.
Status embedding(const Weight& rows, const void* ids, bool wide_ids, int64_t m, const Threads& threads);

}  // namespace qao::cpu::gguf

namespace qao::cpu::avx512 {
// A row of k columns in `dtype`.
void dequantize_gguf(int64_t type, const uint8_t* row, int64_t k, DType dtype, void* out);
}  // namespace qao::cpu::avx512
