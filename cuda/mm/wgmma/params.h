// What launch_sm90.cu and grouped_sm90.cu hand to kernels.
#pragma once

#include "mm/launch.h"
#include "mm/wgmma/kernels.h"

namespace qao::mm::wgmma {

// Of a dense product; W, scales and bias are those of expert 0 where there are several.
Params params_of(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x);
// `experts`: weights that follow each other. Params::m rows of x.
Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                        const Params& p, int64_t experts, TensorMaps* maps);

}  // namespace qao::mm::wgmma
