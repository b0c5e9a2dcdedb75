// What plan() asks about the streaming bodies. Pure host code. A plan function returns false where another body is
// faster, or nothing fits.
#pragma once

#include <vector>

#include "qao/grouped_mm.h"

namespace qao::mm::stream {

bool supports(const Problem& problem, const Gpu& gpu);
bool plan_resident(const Problem& problem, const Gpu& gpu, Plan* plan);  // the only one for normed problems
bool plan_tma(const Problem& problem, const Gpu& gpu, Plan* plan);
bool plan_ring(const Problem& problem, const Gpu& gpu, Plan* plan);

// Of experts; no Hopper, another x or more rows an expert: false.
bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);

void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::mm::stream
