// Kernel parameters and TMA descriptors of a problem, for launch_sm90.cu and grouped_launch_sm90.cu.
#pragma once

#include "gemm/launch.h"
#include "gemm/sm90_ws/params.h"

namespace qao::gemm::sm90_ws {

// Parameters of a dense GEMM. With several experts, W, scales and bias are those of expert 0.
Params params_of(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x);
// `experts`: number of contiguous weights. x has Params::m rows.
Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                        const Params& p, int64_t experts, TensorMaps* maps);

}  // namespace qao::gemm::sm90_ws
