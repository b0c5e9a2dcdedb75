// Float weights [N, K] to the tensors that products read, where ranges are not searched: the scale maps the largest
// magnitude, or the range, of what shares it onto the codes. csrc/quantize_weight_in_place.cpp is the only caller; no
// torch.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::weight {

struct Problem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kBFloat16;
  Format format = Format::kInt4;  // kInt4, packed as cuda/int4/layout.h says; kInt8 and kFp8: rows of bytes
  int64_t rows = 1, columns = 0;  // that share a scale. int4: 1 x 32, 64, 128, 256 or k. int8: 1 x k. fp8: 1 x k, n x
                                  // k, or 128 x 128
  bool symmetric = true;          // of int4: no zero points
  bool whole_zeros = false;       // of int4: no zero points but whole numbers, and no grids of sixteen steps
  DType scale_dtype = DType::kFloat32;

  int64_t block_rows() const { return (n + rows - 1) / rows; }
  int64_t block_columns() const { return (k + columns - 1) / columns; }
};

struct Arguments {
  const void* weight = nullptr;  // [n, k] of weight_dtype, unit stride along k
  int64_t weight_stride = 0;     // elements
  uint8_t* q = nullptr;          // 16-byte aligned
  void* scales = nullptr;        // int4: with zero points, as the layout says; else float32 [block_rows, block_columns]
  // [1]: 1 where a value or a scale is not finite; never set back. Values beyond 1e19 may count as such.
  int32_t* fault = nullptr;
  void* workspace = nullptr;
};

// Bytes of device memory that `workspace` must have.
int64_t workspace_bytes(const Problem& problem);

// Enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous.
Status quantize(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::weight
