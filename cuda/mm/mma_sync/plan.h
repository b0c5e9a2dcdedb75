// Planning of the mma.sync kernels, host code only. A plan function returns false if no tile fits.
#pragma once

#include "qao/mm.h"

namespace qao::mm::mma_sync {

bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);

// Whether the GEMM kernel would quantize x.
bool quantizes(const Problem& problem, const Gpu& gpu);

bool supports_fp8(const Problem& problem, const Gpu& gpu);
bool plan_fp8(const Problem& problem, const Gpu& gpu, Plan* plan);

namespace float_int4 {
bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
}  // namespace float_int4

}  // namespace qao::mm::mma_sync
