// What the kernels are told, and who launches which.
#pragma once

#include <cuda_runtime.h>

#include "qao/quantize_weight.h"

namespace qao::weight {

struct Params {
  const void* weight;
  uint8_t* q;
  void* scales;
  int32_t* fault;     // set before: nothing is written
  uint32_t* largest;  // bits of the largest magnitude of all; null: not known
  bool one_scale;     // for all, by `largest`
  int32_t* report;    // of the host, or null: what `fault` is where `largest` is above the limit
  uint32_t limit;     // its bits
  int64_t stride;     // elements, of the weight
  int64_t n, k;
  int64_t columns;  // that share a scale
  int block_columns;
  bool symmetric, whole_zeros;
  bool aligned;  // rows of the weight and of q can be read and written 16 and 8 bytes at a time; K is a multiple of 8
  DType scale_dtype;
  float smallest;  // scale: groups of zeros, too, need one to divide by
};

// Whether the weight is to stay as it is, by a fault that was found before; the same for a warp. Others of this launch
// may write it.
__device__ __forceinline__ bool is_stopped(const Params& p) {
  return __any_sync(~0u, *static_cast<const volatile int32_t*>(p.fault));
}

Status quantize_int4(const Params& params, DType dtype, cudaStream_t stream);
Status quantize_fp4(const Params& params, DType dtype, cudaStream_t stream);
Status quantize_rows(const Params& params, DType dtype, Format format, cudaStream_t stream);
Status quantize_blocks(const Params& params, DType dtype, cudaStream_t stream);
Status find_largest(const Params& params, DType dtype, cudaStream_t stream);  // `largest` is 0

}  // namespace qao::weight
