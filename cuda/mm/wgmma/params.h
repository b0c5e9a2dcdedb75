// Kernel parameters and TMA descriptors of a problem, for launch_sm90.cu and grouped_sm90.cu.
#pragma once

#include "mm/launch.h"
#include "mm/wgmma/kernels.h"

namespace qao::mm::wgmma {

// Parameters of a dense GEMM. With several experts, W, scales and bias are those of expert 0.
Params params_of(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x);
// `experts`: number of contiguous weights. x has Params::m rows.
Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                        const Params& p, int64_t experts, TensorMaps* maps);

}  // namespace qao::mm::wgmma
