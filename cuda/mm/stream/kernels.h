// The streaming kernels as launch.cu sees them. `config`: a row of the body's .inc file; `half_x`: x is float16, not
// bfloat16.
#pragma once

#include <cuda.h>

#include "mm/int4_params.h"
#include "mm/stream/resident.h"
#include "mm/stream/ring.h"
#include "mm/stream/tma.h"
#include "qao/types.h"

namespace qao::mm::stream {

using Params = Int4Params;

// `groups` of a K-step, but for those that are columns of their own.
using RingKernel = void (*)(Params, RingParams);
RingKernel ring_kernel(int config, int groups, bool has_zeros, DType scale_dtype);

// Of an fp4 weight beside a bfloat16 x, as fp4_resident_kernel().
RingKernel fp4_ring_kernel(int config, int groups);

using ResidentKernel = void (*)(Params, ResidentParams);
ResidentKernel resident_kernel(int config, bool half_x, int groups, bool has_zeros, DType scale_dtype);

ResidentKernel fp4_resident_kernel(int config, int groups);

// `half`: the parameters are float16, not bfloat16. The map is that of x.
using TmaKernel = void (*)(Params, TmaParams, CUtensorMap);
TmaKernel tma_kernel(int config, bool half_x, bool zeros, bool half);

}  // namespace qao::mm::stream
