// The time that plan() expects a plan to take. Work is counts (Terms) times their measured costs (mm/wgmma/costs.inc,
// written by `python -m bench tune`); reading is the bytes of W at the rate of the memory. They overlap: the time is
// the longer of the two and a share of the shorter.
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
  const char* operands = "";  // names, with plan.tile_m, the row of mm/wgmma/costs.inc; "": not chosen by cost
  Terms counts{};
};

}  // namespace qao
