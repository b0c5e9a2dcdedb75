// Heuristics of the WGMMA kernels. Pure host code.
#pragma once

#include <span>
#include <vector>

#include "qao/grouped_gemm.h"

namespace qao::gemm::sm90_ws {

bool supports(const Problem& problem, const Gpu& gpu);
// Reason to prefer another kernel family for a supported problem; null if none.
const char* against(const Problem& problem, const Gpu& gpu);
// The plan of least expected time; false if against() gives a reason.
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// Reason why the kernels cannot run the problem; null if they can.
const char* unfit(const Problem& problem);
// Plan of one kernel for weights of `rows` out_features each; false if one kernel for each is as fast.
bool plan_merged(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan);
// Plan of a grouped GEMM; false without Hopper, without a kernel, or with few rows per expert.
bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);
// All plans, with their terms in the cost model.
void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::gemm::sm90_ws
