// Quantization of weights [N, K] into the tensors that kernels read, without a range search.
//
// The scale maps the largest magnitude, or the range, of the values that share it onto the codes.
// csrc/ops/quantize_weight_in_place.cpp is the only caller.
#pragma once

#include <cstdint>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::weight {

struct Problem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kBFloat16;
  Format format = Format::kInt4;  // kInt4 and kFp4: packed (their layout.h); kInt8 and kFp8: row-major
  int64_t rows = 1, columns = 0;  // elements per scale. int4: 1 x 32, 64, 128, 256 or k. fp4: 1 x 32 (MXFP4) or 16
                                  // (NVFP4). int8: 1 x k. fp8: 1 x k, n x k, or 128 x 128
  bool symmetric = true;          // int4: no zero points
  bool whole_zeros = false;       // int4: integer zero points only, and no detection of grids of sixteen steps
  DType scale_dtype = DType::kFloat32;

  int64_t block_rows() const { return (n + rows - 1) / rows; }
  int64_t block_columns() const { return (k + columns - 1) / columns; }
};

struct Arguments {
  const void* weight = nullptr;  // [n, k] of weight_dtype, unit stride along k
  int64_t weight_stride = 0;     // elements
  uint8_t* q = nullptr;          // 16-byte aligned
  void* scales = nullptr;        // packed: see the layout; else float32 [block_rows, block_columns]
  // [1]: set to 1 if a value or a scale is not finite; never cleared. Values beyond 1e19 may count as such. If already
  // 1, nothing is written.
  int32_t* fault = nullptr;
  float* largest = nullptr;  // [1]: the largest magnitude in W, if known; NaN if a value is NaN
};

// Whether `quantize` requires `largest`: one scale for all of W, or one divisor of all scales.
bool needs_largest(const Problem& problem);

// Writes `largest` from W alone. These two are enqueued on `stream` (a cudaStream_t) of the current device.
// Asynchronous.
Status find_largest(const Problem& problem, const Arguments& arguments, void* stream);
Status quantize(const Problem& problem, const Arguments& arguments, void* stream);

// Runs both. If a magnitude is above `limit` or NaN, q and scales stay unchanged and `loaded` is false. `fault` and
// `largest` are consecutive scratch memory. Synchronizes on the first only, so that the copy of the next weight
// overlaps the quantization of this one. The stream must not be capturing.
Status load(const Problem& problem, const Arguments& arguments, float limit, bool* loaded, void* stream);

}  // namespace qao::weight
