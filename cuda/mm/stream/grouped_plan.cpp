// How ring.cuh runs few rows an expert: how many CTAs share an expert's row tiles.
#include <algorithm>

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
constexpr int64_t kWaves = 2;  // where CTAs do not all run at once: the start of one costs 5 us

// CTAs that share the row tiles of one tile of rows. All at once if these are enough to fill the GPU, for all of them
// then read at the same rate and end together, though fewer tiles exist than may.
int64_t blocks_of(int64_t tiles, int64_t row_tiles, int64_t places) {
  const int64_t blocks = places >= 2 * tiles ? places / tiles : ceil_div(kWaves * places, tiles);
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
  const int64_t row_tiles = tiles_n(problem.n);
  const int64_t blocks = blocks_of(tiles, row_tiles, int64_t{gpu.num_sms} * kGrouped.ctas_per_sm);
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
