// Heuristics of the skinny-GEMM kernels, host code only.
// A plan function returns false if another kernel family is faster or nothing fits.
#pragma once

#include <span>
#include <vector>

#include "qao/grouped_gemm.h"

namespace qao::gemm::sm90_skinny {

bool supports(const Problem& problem, const Gpu& gpu);
bool plan_smem_x(const Problem& problem, const Gpu& gpu, Plan* plan);  // the only kernels that fuse RMSNorm
bool plan_merged(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan);
bool plan_tma_x(const Problem& problem, const Gpu& gpu, Plan* plan);
bool plan_ring_x(const Problem& problem, const Gpu& gpu, Plan* plan);

// Plans a grouped GEMM. Returns false before Hopper, for x that is not bfloat16 and for too many rows per expert.
bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);

void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::gemm::sm90_skinny
