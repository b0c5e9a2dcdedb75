// What plan() asks about the Hopper body. Pure host code.
#pragma once

#include <vector>

#include "qao/mm8.h"

namespace qao::mm8::sm90 {

// Why the body cannot serve a problem; null if it can.
const char* against(const Problem& problem);
// The plan of least expected time, for a problem that nothing is against.
void plan(const Problem& problem, const Gpu& gpu, Plan* plan);
// All plans, with what they are expected to cost.
void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all);

}  // namespace qao::mm8::sm90
