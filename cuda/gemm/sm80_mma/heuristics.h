// Planning of the mma.sync kernels, host code only. A plan function returns false if no tile fits.
#pragma once

#include "qao/gemm.h"

namespace qao::gemm::sm80_mma {

bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);

// Whether the GEMM kernel would quantize x.
bool quantizes(const Problem& problem, const Gpu& gpu);

bool supports_fp8(const Problem& problem, const Gpu& gpu);
bool plan_fp8(const Problem& problem, const Gpu& gpu, Plan* plan);

namespace weight_only {
bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
}  // namespace weight_only

}  // namespace qao::gemm::sm80_mma
