// Heuristics of the mma.sync kernels, host code only. A plan function returns false if no tile fits.
#pragma once

#include "qao/grouped_gemm.h"

namespace qao::gemm::sm80_mma {

// Kernels with 8-bit x, W or both: for any GPU, for Hopper, and with fp8 x for fp8 tensor cores.
bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
bool supports_sm90(const Problem& problem, const Gpu& gpu);
bool plan_sm90(const Problem& problem, const Gpu& gpu, Plan* plan);
bool supports_sm89(const Problem& problem, const Gpu& gpu);
bool plan_sm89(const Problem& problem, const Gpu& gpu, Plan* plan);

// Whether the GEMM kernel would quantize x.
bool quantizes(const Problem& problem, const Gpu& gpu);

// Kernels with float x and int4 or fp4 W.
namespace weight_only {
bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
}  // namespace weight_only

bool supports_grouped(const Problem& problem);
Status plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);

// The error of a GPU with too little shared memory.
Status no_tile(const Gpu& gpu);

}  // namespace qao::gemm::sm80_mma
