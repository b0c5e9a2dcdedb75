// The skinny-GEMM kernels as launch.cu sees them.
// `config` is a row of the family's .inc file; `half_x` selects float16 x over bfloat16.
#pragma once

#include <cuda.h>

#include "gemm/sm90_skinny/params_ring_x.h"
#include "gemm/sm90_skinny/params_smem_x.h"
#include "gemm/sm90_skinny/params_tma_x.h"
#include "gemm/weight_only_params.h"
#include "qao/types.h"

namespace qao::gemm::sm90_skinny {

using Params = Int4Params;

// `groups` is the number of groups per K-step that are accumulated separately.
using RingXKernel = void (*)(Params, RingXParams);
RingXKernel ring_x_kernel(int config, int groups, bool has_zeros, DType scale_dtype);

// For an fp4 weight and bfloat16 x, as fp4_smem_x_kernel().
RingXKernel fp4_ring_x_kernel(int config, int groups);

using SmemXKernel = void (*)(Params, SmemXParams);
SmemXKernel smem_x_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype);

SmemXKernel fp4_smem_x_kernel(int config, int groups);

// The same for several int4 weights, with bfloat16 x, scales and zeros.
using MergedKernel = void (*)(Params, SmemXParams, MergedParts);
MergedKernel merged_kernel(int config, int groups, bool has_zeros);

// `half` selects float16 scales and zeros over bfloat16. The tensor map is that of x.
using TmaXKernel = void (*)(Params, TmaXParams, CUtensorMap);
TmaXKernel tma_x_kernel(int config, bool half_x, bool zeros, bool half);

}  // namespace qao::gemm::sm90_skinny
