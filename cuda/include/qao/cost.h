// What plan() expects of a plan: how often it does what takes time, times microseconds that `python -m bench tune`
// measured.
#pragma once

#include <array>

namespace qao {

enum Term : int {
  kKTiles,  // of K, one after the other, in all waves of a CTA
  kWaves,   // of output tiles: filling the pipeline, the epilogue
  kSplits,  // 1 if CTAs add up their parts of K
  kTerms,
};
using Terms = std::array<double, kTerms>;

inline double microseconds(const Terms& counts, const Terms& costs) {
  double sum = 0;
  for (int i = 0; i < kTerms; ++i) sum += counts[i] * costs[i];
  return sum;
}

// A way to run a problem.
template <typename Plan>
struct Candidate {
  Plan plan;
  const char* operands = "";  // with plan.tile_m the row of mm8/sm90_costs.inc; "": no cost decides on it
  Terms counts{};
};

}  // namespace qao
