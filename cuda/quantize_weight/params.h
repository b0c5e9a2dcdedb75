// Kernel parameters and launchers of weight quantization.
#pragma once

#include <cuda_runtime.h>

#include "qao/quantize_weight.h"

namespace qao::weight {

struct Params {
  const void* weight;
  uint8_t* q;
  void* scales;
  int32_t* fault;     // set beforehand: nothing is written
  uint32_t* largest;  // bits of the largest magnitude of all; null: unknown
  bool one_scale;     // one scale for the whole weight, from `largest`
  int32_t* report;    // host memory, or null: receives `fault` if `largest` exceeds the limit
  uint32_t limit;     // bits of the limit
  int64_t stride;     // elements, of the weight
  int64_t n, k;
  int64_t columns;  // columns per scale
  int block_columns;
  bool symmetric, whole_zeros;
  bool aligned;  // rows of the weight and of q can be read and written 16 and 8 bytes at a time; K is a multiple of 8
  DType scale_dtype;
  float smallest;  // smallest scale: groups of zeros need a divisor too
};

// Whether an earlier fault says to keep the weight, uniform across the warp. Other CTAs of this launch may set it.
__device__ __forceinline__ bool is_stopped(const Params& p) {
  return __any_sync(~0u, *static_cast<const volatile int32_t*>(p.fault));
}

Status quantize_int4(const Params& params, DType dtype, cudaStream_t stream);
Status quantize_fp4(const Params& params, DType dtype, cudaStream_t stream);
Status quantize_rows(const Params& params, DType dtype, Format format, cudaStream_t stream);
Status quantize_blocks(const Params& params, DType dtype, cudaStream_t stream);
Status find_largest(const Params& params, DType dtype, cudaStream_t stream);  // *largest must be 0

}  // namespace qao::weight
