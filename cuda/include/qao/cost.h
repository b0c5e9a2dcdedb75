// Cost model of plan(): the expected time of a plan.
//
// Compute is counts (Terms) times measured costs (gemm/sm90_ws/cost_model.inc, written by `python -m bench tune`).
// Memory time is the bytes of W over the bandwidth. The two overlap: the result is the longer one plus a fraction of
// the shorter one.
#pragma once

#include <algorithm>
#include <array>

namespace qao {

enum Term : int {
  kKTiles,  // sequential k-tiles, summed over the waves of a CTA
  kWaves,   // waves of output tiles: pipeline fill and epilogue
  kSplits,  // 1 for split-K
  kParts,   // splits of K, 0 without split-K
  kTerms,
};
using Terms = std::array<double, kTerms>;

struct Memory {
  double bytes_per_us;
  double overlap;  // fraction of the shorter of compute and memory time that is not hidden
};

inline double microseconds(const Terms& counts, const Terms& costs, double bytes, const Memory& memory) {
  double work = 0;
  for (int i = 0; i < kTerms; ++i) work += counts[i] * costs[i];
  const double reading = bytes / memory.bytes_per_us;
  return std::max(work, reading) + memory.overlap * std::min(work, reading);
}

// A plan and its position in the cost model.
template <typename Plan>
struct Candidate {
  Plan plan;
  const char* operands = "";  // key of gemm/sm90_ws/cost_model.inc together with plan.tile_m; "": not selected by cost
  Terms counts{};
};

}  // namespace qao
