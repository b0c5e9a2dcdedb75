// What plan() asks about the body on wgmma. Pure host code.
#pragma once

#include <vector>

#include "qao/mm.h"

namespace qao::mm::wgmma {

bool supports(const Problem& problem, const Gpu& gpu);
// The reason to leave a problem that this body supports to another one; null if there is none.
const char* against(const Problem& problem, const Gpu& gpu);
// The plan of least expected time; false where something is against it.
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// All plans, with what they are expected to cost.
void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::mm::wgmma
