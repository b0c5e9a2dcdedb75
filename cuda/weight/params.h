// What the kernels are told, and who launches which.
#pragma once

#include <cuda_runtime.h>

#include "qao/quantize_weight.h"

namespace qao::weight {

struct Params {
  const void* weight;
  uint8_t* q;
  void* scales;
  int32_t* fault;
  uint32_t* largest;  // bits of the largest magnitude of all; null: of each row
  int64_t stride;     // elements, of the weight
  int64_t n, k;
  int64_t columns;  // that share a scale
  int block_columns;
  bool symmetric, whole_zeros;
  bool aligned;  // rows of the weight and of q can be read and written 16 and 8 bytes at a time; K is a multiple of 8
  DType scale_dtype;
  float smallest;  // scale: groups of zeros, too, need one to divide by
};

Status quantize_int4(const Params& params, DType dtype, cudaStream_t stream);
Status quantize_rows(const Params& params, DType dtype, Format format, cudaStream_t stream);
Status quantize_blocks(const Params& params, DType dtype, cudaStream_t stream);

}  // namespace qao::weight
