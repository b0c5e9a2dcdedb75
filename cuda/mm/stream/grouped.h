// Grouped products on ring.cuh as launch.cu sees them.
#pragma once

#include <algorithm>

#include "mm/int4_params.h"
#include "mm/routing.h"
#include "mm/stream/ring.h"

namespace qao::mm::stream {

using GroupedTile = RingTile<1, 4, 12, 1>;
constexpr RingConfig kGrouped = ring_config<GroupedTile>(4);

// How CTAs share the tiles of rows that a routing has, which only the GPU knows.
struct Spread {
  int places;       // CTAs that run at once
  int most_blocks;  // CTAs that may share the row tiles of a tile
  int tile_us;      // microseconds that one would take for all of them
};
// How many of `ctas` share each of `tiles`: as many as run at once, or in two rounds, if a finer cut saves more than it
// takes to start twice.
QAO_HOST_DEVICE int sharing(const Spread& s, int ctas, int tiles) {
  constexpr int kStartUs = 3;
  if (tiles < 1) return 1;
  const int room = 2 * s.places < ctas ? 2 * s.places : ctas;
  const auto at_most = [&](int blocks) { return blocks < 1 ? 1 : blocks < s.most_blocks ? blocks : s.most_blocks; };
  const int once = at_most(s.places / tiles), twice = at_most(room / tiles);
  return s.tile_us * (twice - 2 * once) > kStartUs * once * twice ? twice : once;
}

// `groups` of a K-step.
using GroupedKernel = void (*)(Int4Params, RingParams, Routing, Spread);
GroupedKernel grouped_kernel(int groups, bool has_zeros, DType scale_dtype);
GroupedKernel fp4_grouped_kernel(int groups);

// How a CTA walks an expert. False if that takes more than `room` bytes.
inline bool grouped_params(const Problem& problem, int room, RingParams* to, int* shared_bytes) {
  Problem of_expert = problem;
  of_expert.m = kGrouped.tokens;
  return ring_params(of_expert, kGrouped, 1, 1, room, to, shared_bytes);
}
inline Spread spread_of(const Problem& problem, const Plan& plan) {
  constexpr int64_t kBytesInMicrosecond = 4'200'000;  // that all CTAs read
  const int64_t us = weight_bytes(problem) * plan.ctas_at_once / kBytesInMicrosecond;
  return {plan.ctas_at_once, static_cast<int>(ceil_div(tiles_n(problem.n), kGrouped.tiles_n)),
          static_cast<int>(std::min<int64_t>(us, 100'000))};
}

// Of shared memory that the kernel names itself, the rows of x: as long as what the rest is aligned to.
constexpr int kGroupedStaticBytes = 1024;

}  // namespace qao::mm::stream
