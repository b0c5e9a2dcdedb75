// Signatures of the skinny-GEMM kernels, and those for fp4 weights, which are compiled apart from their launch.
#pragma once

#include <cuda.h>

#include "gemm/sm90_skinny/params.h"
#include "gemm/weight_only_params.h"
#include "qao/types.h"

namespace qao::gemm::sm90_skinny {

using Params = Int4Params;
using SmemXKernel = void (*)(Params, SmemXParams);
using MergedKernel = void (*)(Params, SmemXParams, MergedParts);
using TmaXKernel = void (*)(Params, TmaXParams, CUtensorMap);  // the tensor map of x
using RingXKernel = void (*)(Params, RingXParams);

// bfloat16 x. `config` is a row of the kernel's tiles, `groups` the number of groups per K-step that are accumulated
// separately.
SmemXKernel fp4_smem_x_kernel(int config, int groups);
RingXKernel fp4_ring_x_kernel(int config, int groups);

}  // namespace qao::gemm::sm90_skinny
