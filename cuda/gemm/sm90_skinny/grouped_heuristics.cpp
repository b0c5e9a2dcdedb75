// Heuristics of grouped GEMMs on the skinny-GEMM kernels.
#include <algorithm>
#include <iterator>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm90_skinny/grouped.h"
#include "gemm/sm90_skinny/heuristics.h"

namespace qao::gemm::sm90_skinny {
namespace {

// Average rows per expert. Beyond that sm90_ws/ needs fewer tiles. An fp4 weight accumulates each group separately.
constexpr int64_t kMostRows = 6, kMostRowsOfFp4 = 4;
// Limits with x in shared memory: the end of a pass costs relatively less with more columns.
constexpr int64_t kMostRowsInMemory = 8, kMostRowsOfManyColumns = 12, kManyColumns = 4096;

int64_t most_rows_in_memory(const Problem& problem, const Config& config) {
  return problem.k >= kManyColumns && config.tokens == kTmaXTokens ? kMostRowsOfManyColumns : kMostRowsInMemory;
}

// One wave of CTAs. If there may be many tiles, two waves, since it is unknown which CTAs end first: an SM then starts
// its next CTA as soon as one ends. CTAs without work take 1 to 2 us to find out.
void plan_ctas(const Experts& experts, int64_t places, Plan* plan) {
  const int64_t tiles = token_tiles(experts.count, experts.rows, plan->tile_m);
  plan->ctas = 4 * tiles > places ? 2 * places : places;
  plan->ctas_at_once = static_cast<int>(places);
}

bool plan_grouped_tma_x(const Problem& problem, const Experts& experts, int64_t average, const Gpu& gpu, Plan* plan) {
  for (int i = 0; i < static_cast<int>(std::size(kGroupedTmaX)); ++i) {
    const Config& config = kGroupedTmaX[i];
    TmaXParams cut;
    int shared_bytes;
    const int room = gpu.shared_bytes_per_cta - kGroupedStaticBytes;
    if (!grouped_tma_x_params(problem, i, room, &cut, &shared_bytes)) continue;
    if (average > most_rows_in_memory(problem, config)) return false;
    plan->family = Family::kSm90SkinnyTmaX;
    plan->reason = "grouped: some bfloat16 rows an expert from sm_90 on, x stays in shared memory";
    plan->config = i;
    plan->tile_n = config.tiles_n * kTileN;
    plan->tile_m = config.tokens;
    plan->warps = config.warps;
    plan->stages = config.stages;
    plan_ctas(experts, gpu.num_sms, plan);
    plan->shared_bytes = shared_bytes;
    return true;
  }
  return false;
}

bool plan_grouped_ring_x(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  const int room = ring_x_shared_limit(kGroupedRingX, gpu.shared_bytes_per_cta) - kGroupedStaticBytes;
  RingXParams cut;
  int shared_bytes;
  if (!grouped_ring_x_params(problem, room, &cut, &shared_bytes)) return false;
  if (cut.plain_steps == 0) return false;  // every K-step would take the slow path
  plan->family = Family::kSm90SkinnyRingX;
  plan->reason = "grouped: few bfloat16 rows an expert from sm_90 on, weights stream through mma.sync";
  plan->tile_n = kGroupedRingX.tiles_n * kTileN;
  plan->tile_m = kGroupedRingX.tokens;
  plan->warps = kGroupedRingX.warps;
  plan->stages = cut.stages;
  plan_ctas(experts, int64_t{gpu.num_sms} * kGroupedRingX.ctas_per_sm, plan);
  plan->shared_bytes = shared_bytes;
  return true;
}

}  // namespace

bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  const int64_t average = ceil_div(experts.rows, std::max<int64_t>(1, std::min(experts.count, experts.rows)));
  const bool fp4 = is_float_fp4(problem);
  if (problem.batch_invariant || !runs_sm90(gpu) || !(is_float_int4(problem) || fp4)) return false;
  if (fp4 && problem.k <= problem.group_size) return false;  // a K-step lies in one group
  if (problem.x_dtype != DType::kBFloat16) return false;
  const bool few = average <= (fp4 ? kMostRowsOfFp4 : kMostRows);
  const bool planned = few ? plan_grouped_ring_x(problem, experts, gpu, plan)
                           : !fp4 && plan_grouped_tma_x(problem, experts, average, gpu, plan);
  if (!planned) return false;
  plan->instruction = "mma.sync bf16";
  plan->runs = true;
  return true;
}

}  // namespace qao::gemm::sm90_skinny
