// How ring.cuh runs few rows an expert: how many CTAs share an expert's row tiles.
#include <algorithm>
#include <cmath>

#include "common/integers.h"
#include "mm/gpu.h"
#include "mm/problem.h"
#include "mm/stream/grouped.h"
#include "mm/stream/plan.h"

namespace qao::mm::stream {
namespace {

// Of an expert, on average: wgmma/ does more of them in fewer tiles. Groups shorter than a K-step have sums of their
// own, so that less of a CTA's time is reading W.
constexpr int64_t kMostRows = 6, kMostRowsOfShortGroups = 3;
// Where CTAs do not share an expert, so that the last of them leave most of the GPU idle.
constexpr int64_t kMostRowsUnshared = 4;

// Tiles of rows that tokens which choose at random hardly exceed: rows of an expert are spread as Poisson's law has it,
// and one and a half standard deviations of the experts that are chosen are added.
int64_t likely_tiles(const Experts& experts) {
  const auto count = static_cast<double>(std::max<int64_t>(1, experts.count));
  const double average = static_cast<double>(experts.rows) / count;
  const double none = std::exp(-average);
  double chance = none, one_tile = none;  // of as many rows as a tile has, or fewer
  for (int rows = 1; rows <= kGrouped.tokens; ++rows) {
    chance *= average / rows;
    one_tile += chance;
  }
  const double tiles = count * (1 - none + 1 - one_tile);
  const double deviation = std::sqrt(std::max(0.0, count * none * (1 - (1 + average) * none)));
  const int64_t most = token_tiles(experts.count - 1, experts.rows, kGrouped.tokens);  // without the rows of nobody
  return std::clamp<int64_t>(static_cast<int64_t>(std::ceil(tiles + 1.5 * deviation)), 1, std::max<int64_t>(most, 1));
}

// CTAs that share the row tiles of one tile of rows: as many as all run at once, for these read at one rate and end
// together. Two rounds of CTAs where that would leave two fifths of their places empty: one CTA alone reads at most 1.7
// times as fast as one of a full GPU.
int64_t blocks_of(int64_t tiles, int64_t row_tiles, int64_t places) {
  const int64_t at_once = places / tiles;
  const int64_t blocks = 5 * at_once * tiles >= 3 * places ? at_once : 2 * places / tiles;
  return std::clamp<int64_t>(blocks, 1, ceil_div(row_tiles, kGrouped.tiles_n));
}

}  // namespace

bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  const int64_t average = ceil_div(experts.rows, std::max<int64_t>(1, std::min(experts.count, experts.rows)));
  const bool fp4 = is_float_fp4(problem);
  if (problem.batch_invariant || !runs_sm90(gpu) || !(is_float_int4(problem) || fp4)) return false;
  if (fp4 && problem.k <= problem.group_size) return false;  // a K-step of one group
  if (problem.x_dtype != DType::kBFloat16 ||
      average > (problem.group_size < kStepColumns ? kMostRowsOfShortGroups : kMostRows)) {
    return false;
  }
  const int64_t tiles = token_tiles(experts.count, experts.rows, kGrouped.tokens);
  const int64_t likely = likely_tiles(experts), places = int64_t{gpu.num_sms} * kGrouped.ctas_per_sm;
  if (average > kMostRowsUnshared && places < 2 * likely) return false;
  const int64_t blocks = blocks_of(likely, tiles_n(problem.n), places);
  constexpr int64_t kMostInGridZ = 65535;
  const int room = ring_shared_limit(kGrouped, gpu.shared_bytes_per_cta) - kGroupedStaticBytes;
  RingParams cut;
  int shared_bytes;
  if (tiles > kMostInGridZ || blocks > kMostInGridZ ||
      !grouped_params(problem, static_cast<int>(blocks), room, &cut, &shared_bytes)) {
    return false;
  }
  if (cut.plain_steps == 0) return false;  // every step by the slow way
  plan->body = Body::kStreamRing;
  plan->reason = "grouped: few bfloat16 rows an expert from sm_90 on, weights stream through mma.sync";
  plan->instruction = "mma.sync bf16";
  plan->tile_n = kGrouped.tiles_n * kTileN;
  plan->tile_m = kGrouped.tokens;
  plan->warps = kGrouped.warps;
  plan->stages = cut.stages;
  plan->runs = true;
  plan->ctas = tiles * blocks;
  plan->shared_bytes = shared_bytes;
  return true;
}

}  // namespace qao::mm::stream
