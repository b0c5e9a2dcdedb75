// How ring.cuh runs few rows an expert.
#include <algorithm>

#include "common/integers.h"
#include "mm/gpu.h"
#include "mm/problem.h"
#include "mm/stream/grouped.h"
#include "mm/stream/plan.h"

namespace qao::mm::stream {
namespace {

// Of an expert, on average: wgmma/ does more of them in fewer tiles. Every group of an fp4 weight has sums of its own.
constexpr int64_t kMostRows = 6, kMostRowsOfFp4 = 3;

// The GPU has tiles for as many CTAs as run at once, unless there may be many: then for twice as many, from which finer
// cuts can be made. Those that are left over take 1 to 2 us to see it.
int64_t ctas_for(int64_t tiles, int64_t places) { return std::max(tiles, 4 * tiles > places ? 2 * places : places); }

}  // namespace

bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  const int64_t average = ceil_div(experts.rows, std::max<int64_t>(1, std::min(experts.count, experts.rows)));
  const bool fp4 = is_float_fp4(problem);
  if (problem.batch_invariant || !runs_sm90(gpu) || !(is_float_int4(problem) || fp4)) return false;
  if (fp4 && problem.k <= problem.group_size) return false;  // a K-step of one group
  if (problem.x_dtype != DType::kBFloat16 || average > (fp4 ? kMostRowsOfFp4 : kMostRows)) return false;
  const int64_t tiles = token_tiles(experts.count, experts.rows, kGrouped.tokens);
  const int64_t places = int64_t{gpu.num_sms} * kGrouped.ctas_per_sm;
  const int room = ring_shared_limit(kGrouped, gpu.shared_bytes_per_cta) - kGroupedStaticBytes;
  RingParams cut;
  int shared_bytes;
  constexpr int64_t kMostInGridY = 65535;
  if (ctas_for(tiles, places) > kMostInGridY || !grouped_params(problem, room, &cut, &shared_bytes)) return false;
  if (cut.plain_steps == 0) return false;  // every step by the slow way
  plan->body = Body::kStreamRing;
  plan->reason = "grouped: few bfloat16 rows an expert from sm_90 on, weights stream through mma.sync";
  plan->instruction = "mma.sync bf16";
  plan->tile_n = kGrouped.tiles_n * kTileN;
  plan->tile_m = kGrouped.tokens;
  plan->warps = kGrouped.warps;
  plan->stages = cut.stages;
  plan->runs = true;
  plan->ctas = ctas_for(tiles, places);
  plan->ctas_at_once = static_cast<int>(places);
  plan->shared_bytes = shared_bytes;
  return true;
}

}  // namespace qao::mm::stream
