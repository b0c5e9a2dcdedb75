// The time that plan() expects of a plan: how often it does what takes time, times what that was measured to take
// (mm/wgmma/costs.inc, by `python -m bench tune`), or reading W, whichever takes longer, and some of the other.
#pragma once

#include <algorithm>
#include <array>

namespace qao {

enum Term : int {
  kKTiles,  // one after the other, in all waves of a CTA
  kWaves,   // of output tiles: filling the pipeline, the epilogue
  kSplits,  // 1 if CTAs add up their parts of K
  kParts,   // of K, if more than one
  kTerms,
};
using Terms = std::array<double, kTerms>;

struct Memory {
  double bytes_per_us;
  double overlap;  // share of the shorter of work and reading that adds to the longer
};

inline double microseconds(const Terms& counts, const Terms& costs, double bytes, const Memory& memory) {
  double work = 0;
  for (int i = 0; i < kTerms; ++i) work += counts[i] * costs[i];
  const double reading = bytes / memory.bytes_per_us;
  return std::max(work, reading) + memory.overlap * std::min(work, reading);
}

// A way to run a problem.
template <typename Plan>
struct Candidate {
  Plan plan;
  const char* operands = "";  // with plan.tile_m the row of mm/wgmma/costs.inc; "": no cost decides on it
  Terms counts{};
};

}  // namespace qao
