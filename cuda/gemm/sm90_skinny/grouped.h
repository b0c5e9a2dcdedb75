// Tiles, parameters and signatures of grouped GEMMs on the kernels of ring_x.cuh and tma_x.cuh.
#pragma once

#include <algorithm>
#include <tuple>

#include "gemm/moe_routing.h"
#include "gemm/sm90_skinny/params.h"
#include "gemm/weight_only_params.h"

namespace qao::gemm::sm90_skinny {

using GroupedRingXTile = Tile<8, 4, 12, 4>;
constexpr Config kGroupedRingX = config_of<GroupedRingXTile>();

// Parameters for dividing the token tiles of a routing among CTAs. Only the device knows the number of tiles.
struct Spread {
  int places;    // CTAs that run concurrently
  int passes;    // passes over the n-tiles of one token tile
  int tile_us;   // microseconds for one CTA to compute a whole token tile
  int start_us;  // microseconds for a CTA to start and finish
};
// Number of parts per token tile: enough to fill one wave, or two to five waves if the finer split saves more than the
// extra starts cost.
QAO_HOST_DEVICE int sharing(const Spread& s, int tiles) {
  constexpr int kMostRounds = 5;
  if (tiles < 1) return 1;
  const auto at_most = [&](int parts) { return parts < 1 ? 1 : parts < s.passes ? parts : s.passes; };
  const float of_round = static_cast<float>(s.places) / static_cast<float>(tiles);
  int best = at_most(static_cast<int>(of_round + 1e-3f));
  if (tiles <= s.places && best * tiles * 20 > s.places * 19) return best;  // the wave is nearly full
  // Unit: microseconds times parts.
  int64_t least = int64_t{(tiles + s.places - 1) / s.places} * (s.tile_us + s.start_us * best);
  for (int rounds = 2; rounds <= kMostRounds; ++rounds) {
    const int parts = at_most(static_cast<int>(of_round * static_cast<float>(rounds) + 1e-3f));
    const int64_t all = int64_t{rounds} * (s.tile_us + s.start_us * parts);
    if (parts > best && all * best < least * parts) best = parts, least = all;
  }
  return best;
}

// Tiles of tma_x.cuh for grouped GEMMs. The first that fits is used, depending on K.
using GroupedTmaXTiles = std::tuple<Tile<16, 5, 8, 2>, Tile<12, 3, 8, 2>>;
constexpr Config kGroupedTmaX[] = {config_of<std::tuple_element_t<0, GroupedTmaXTiles>>(),
                                   config_of<std::tuple_element_t<1, GroupedTmaXTiles>>()};
using GroupedTmaXKernel = void (*)(Int4Params, TmaXParams, Routing, Spread);
GroupedTmaXKernel grouped_tma_x_kernel(int config, bool zeros, bool half);
inline bool grouped_tma_x_params(const Problem& problem, int config, int room, TmaXParams* to, int* shared_bytes) {
  Problem of_expert = problem;
  of_expert.m = kGroupedTmaX[config].tokens;
  return problem.k % kStepColumns == 0 && tma_x_params(of_expert, kGroupedTmaX[config], 1, room, to, shared_bytes);
}

// `groups` per K-step.
using GroupedRingXKernel = void (*)(Int4Params, RingXParams, Routing, Spread);
GroupedRingXKernel grouped_ring_x_kernel(int groups, bool has_zeros, DType scale_dtype);
GroupedRingXKernel fp4_grouped_ring_x_kernel(int groups);

// Kernel parameters for one expert. Returns false if it needs more than `room` bytes.
inline bool grouped_ring_x_params(const Problem& problem, int room, RingXParams* to, int* shared_bytes) {
  Problem of_expert = problem;
  of_expert.m = kGroupedRingX.tokens;
  return ring_x_params(of_expert, kGroupedRingX, 1, 1, room, to, shared_bytes);
}
inline Spread spread_of(const Problem& problem, const Plan& plan) {
  constexpr int64_t kBytesInMicrosecond = 4'200'000, kStartUs = 4;  // of all CTAs; overhead of one CTA
  const int64_t us = std::min<int64_t>(weight_bytes(problem) * plan.ctas_at_once / kBytesInMicrosecond, 100'000);
  const int64_t passes = ceil_div(problem.n, plan.tile_n);  // the last pass of a part may be half empty
  return {plan.ctas_at_once, static_cast<int>(passes), static_cast<int>(us),
          static_cast<int>(kStartUs + us / passes / 2)};
}

// Static shared memory of the kernel, the rows of x, padded to the alignment of the dynamic part.
constexpr int kGroupedStaticBytes = 1024;

}  // namespace qao::gemm::sm90_skinny
