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
  Format format = Format::kInt4;  // kInt4 and kFp4, packed as their layout.h says; kInt8 and kFp8: rows of bytes
  int64_t rows = 1, columns = 0;  // that share a scale. int4: 1 x 32, 64, 128, 256 or k. fp4: 1 x 32 (MXFP4) or 16
                                  // (NVFP4). int8: 1 x k. fp8: 1 x k, n x k, or 128 x 128
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
  void* scales = nullptr;        // packed: as the layout says; else float32 [block_rows, block_columns]
  // [1]: 1 where a value or a scale is not finite; never set back. Values beyond 1e19 may count as such. 1 already:
  // nothing is written.
  int32_t* fault = nullptr;
  float* largest = nullptr;  // [1]: the largest magnitude in all of W, where it is known; NaN if a value is
};

// Whether `quantize` must be given `largest`: one scale for all, or one divisor of all scales.
bool needs_largest(const Problem& problem);

// To `largest`, of W alone. These two are enqueued on `stream` (a cudaStream_t) of the current device. Asynchronous.
Status find_largest(const Problem& problem, const Arguments& arguments, void* stream);
Status quantize(const Problem& problem, const Arguments& arguments, void* stream);

// Both, the second unless a magnitude is above `limit` or NaN: then q and scales stay as they are, and `loaded` is
// false. `fault` and `largest` are memory to work in, one after the other. Waits for the first alone, so that the
// weight after this one is on its way while this one is written. The stream must not be capturing.
Status load(const Problem& problem, const Arguments& arguments, float limit, bool* loaded, void* stream);

}  // namespace qao::weight
