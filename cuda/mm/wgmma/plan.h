// What plan() asks about the body on wgmma. Pure host code.
#pragma once

#include <vector>

#include "qao/grouped_mm.h"

namespace qao::mm::wgmma {

bool supports(const Problem& problem, const Gpu& gpu);
// The reason to leave a problem that this body supports to another one; null if there is none.
const char* against(const Problem& problem, const Gpu& gpu);
// The plan of least expected time; false where something is against it.
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// What the body cannot multiply, read or add up; null if it can.
const char* unfit(const Problem& problem);
// Of experts; no Hopper, no kernel, or few rows an expert: false.
bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan);
// All plans, with what they are expected to cost.
void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::mm::wgmma
