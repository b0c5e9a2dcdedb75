// The skinny-GEMM kernels as launch.cu sees them.
// `config` is a row of the family's .inc file; `half_x` selects float16 x over bfloat16.
#pragma once

#include <cuda.h>

#include "mm/int4_params.h"
#include "mm/stream/resident.h"
#include "mm/stream/ring.h"
#include "mm/stream/tma.h"
#include "qao/types.h"

namespace qao::mm::stream {

using Params = Int4Params;

// `groups` is the number of groups per K-step that are accumulated separately.
using RingKernel = void (*)(Params, RingParams);
RingKernel ring_kernel(int config, int groups, bool has_zeros, DType scale_dtype);

// For an fp4 weight and bfloat16 x, as fp4_resident_kernel().
RingKernel fp4_ring_kernel(int config, int groups);

using ResidentKernel = void (*)(Params, ResidentParams);
ResidentKernel resident_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype);

ResidentKernel fp4_resident_kernel(int config, int groups);

// The same for several int4 weights, with bfloat16 x, scales and zeros.
using MergedKernel = void (*)(Params, ResidentParams, ResidentParts);
MergedKernel merged_kernel(int config, int groups, bool has_zeros);

// `half` selects float16 scales and zeros over bfloat16. The tensor map is that of x.
using TmaKernel = void (*)(Params, TmaParams, CUtensorMap);
TmaKernel tma_kernel(int config, bool half_x, bool zeros, bool half);

}  // namespace qao::mm::stream
