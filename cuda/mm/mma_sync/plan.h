// What plan() asks about the bodies on mma.sync. Pure host code. A plan function returns false where no row fits.
#pragma once

#include "qao/mm.h"

namespace qao::mm::mma_sync {

bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);

// Whether this product would quantise x itself.
bool quantizes(const Problem& problem, const Gpu& gpu);

bool supports_fp8(const Problem& problem, const Gpu& gpu);
bool plan_fp8(const Problem& problem, const Gpu& gpu, Plan* plan);

namespace float_int4 {
bool supports(const Problem& problem, const Gpu& gpu);
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
}  // namespace float_int4

}  // namespace qao::mm::mma_sync
