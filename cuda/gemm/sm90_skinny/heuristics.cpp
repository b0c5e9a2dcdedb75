// Heuristics of the skinny-GEMM kernels.
#include "gemm/sm90_skinny/heuristics.h"

#include <algorithm>
#include <iterator>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny {
namespace {

// Rows of tiles_ring_x.inc, chosen by measurement: at most 8 tokens (Few) or more (Many), and little work per SM
// (Short) or more.
constexpr int kFewShort = 0, kFew = 1, kManyShort = 2, kMany = 3;

// Fields that all plans of this family fill in. A cluster has `split` CTAs.
template <typename Config>
void fill(const Problem& problem, Family family, const char* reason, const Config& config, int index, int clusters,
          int split, int shared_bytes, Plan* plan) {
  plan->family = family;
  plan->reason = reason;
  plan->instruction = problem.x_dtype == DType::kFloat16 ? "mma.sync f16" : "mma.sync bf16";
  plan->config = index;
  plan->tile_n = config.tiles_n * kTileN;
  plan->tile_m = config.tokens;
  plan->warps = config.warps;
  plan->stages = config.stages;
  plan->split_k = split;
  plan->ctas = static_cast<int64_t>(clusters) * split;
  plan->shared_bytes = shared_bytes;
}

// Fills in `plan` if this row of tiles_ring_x.inc can run the problem with `split` CTAs splitting K.
bool fill_ring_x(const Problem& problem, const Gpu& gpu, int index, int split, Plan* plan) {
  const Config& config = kRingX[index];
  const int clusters = static_cast<int>(std::min<int64_t>(gpu.num_sms / split, tiles_n(problem.n)));
  RingXParams params;
  int shared_bytes;
  if (!ring_x_params(problem, config, split, clusters, ring_x_shared_limit(config, gpu.shared_bytes_per_cta), &params,
                     &shared_bytes)) {
    return false;
  }
  fill(problem, Family::kSm90SkinnyRingX, "at most 16 bfloat16 tokens from sm_90 on: weights stream through mma.sync",
       config, index, clusters, split, shared_bytes, plan);
  plan->stages = params.stages;
  return true;
}

bool ring_x_serves(const Problem& problem, const Config& config) {
  if (is_float_fp4(problem) && problem.k <= problem.group_size) return false;  // a K-step lies in one group
  return problem.x_dtype == DType::kBFloat16 && problem.m >= 1 && problem.m <= config.tokens;
}

// More than eight tokens with large N and small K, such as the head of a small language model, are faster with WGMMA.
bool is_shallow(const Problem& problem, const Gpu& gpu) {
  return problem.m > 8 && problem.k <= 8 * kStepColumns && tiles_n(problem.n) >= 8 * gpu.num_sms && problem.x_aligned;
}

// Fills in `plan` if this row of tiles_smem_x.inc can run the problem.
bool fill_smem_x(const Problem& problem, const Gpu& gpu, int index, Plan* plan) {
  if (problem.x_dtype == DType::kFloat16 && (problem.normed || is_float_fp4(problem))) return false;
  if (is_float_fp4(problem) && (problem.k <= problem.group_size || problem.normed)) return false;
  if (problem.m < 1 || problem.m > kSmemXTokens) return false;
  const Config& config = kSmemX[index];
  const int ctas = static_cast<int>(std::min<int64_t>(gpu.num_sms, tiles_n(problem.n) >> problem.gated));
  SmemXParams params;
  int shared_bytes;
  if (!smem_x_params(problem, config, ctas, gpu.shared_bytes_per_cta, &params, &shared_bytes)) return false;
  fill(problem, Family::kSm90SkinnySmemX,
       "at most 8 tokens of 16 bits from sm_90 on: weights stream through mma.sync past x in shared memory", config,
       index, ctas, 1, shared_bytes, plan);
  return true;
}

// Passes of `pass_tiles` n-tiles in the CTA with the most.
int64_t passes_of(const Problem& problem, const Gpu& gpu, int64_t pass_tiles) {
  return ceil_div(ceil_div(tiles_n(problem.n), gpu.num_sms), pass_tiles);
}
// n-tile slots in these passes.
int64_t places_of(const Problem& problem, const Gpu& gpu, int64_t pass_tiles) {
  return passes_of(problem, gpu, pass_tiles) * pass_tiles;
}

// Whether the kernel makes RMSNorm of x, and is faster with it.
bool norm_fits(const Problem& problem, const Gpu& gpu) {
  if (!problem.x_aligned || problem.k % kStepColumns != 0) return false;
  const int64_t largest_x = tiles_n(problem.n) >= 8 * gpu.num_sms ? 32768 : 8192;  // elements
  return problem.m * problem.k <= largest_x;
}

// Plans the same kernel with fused RMSNorm, for the numbers of tokens measured to be faster. The two n-tiles of a pass
// are gate and up.
bool plan_normed(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (!problem.normed || !norm_fits(problem, gpu)) return false;
  if (problem.gated && problem.n % (2 * kTileN) != 0) return false;
  int best = -1;
  for (int index = 0; index < static_cast<int>(std::size(kSmemX)); ++index) {
    if (problem.gated && kSmemX[index].tiles_n != 2) continue;
    const auto places = [&](int row) { return places_of(problem, gpu, kSmemX[row].tiles_n); };
    if (best < 0 || places(index) < places(best)) best = index;
  }
  if (best < 0 || !fill_smem_x(problem, gpu, best, plan)) return false;
  plan->reason = problem.gated ? "few bfloat16 tokens from sm_90 on: RMSNorm and SiLU-multiply within the product"
                               : "few bfloat16 tokens from sm_90 on: RMSNorm within the product";
  return true;
}

// Largest number of bfloat16 tokens for which smem_x.cuh was measured to be faster. It grows with the n-tiles
// per SM. 3, 5 and 6 n-tiles fill its passes of three or two better than the ring's passes of four. Fewer than 3, and 4
// or 8, which fill the ring's passes, need more K-steps.
int64_t most_smem_x_tokens(const Problem& problem, const Gpu& gpu) {
  const int64_t of_sm = ceil_div(tiles_n(problem.n), gpu.num_sms);
  if (problem.k < 24 * kStepColumns && (of_sm < 3 || of_sm % 4 == 0)) return 0;
  if (of_sm == 5 || of_sm == 6) return 8;
  return of_sm > 32 ? 8 : of_sm > 8 ? 5 : of_sm > 6 ? 4 : of_sm == 3 ? 3 : 2;
}

// Rejects large x, because every CTA waits for all of it. float16 always runs here: the portable kernels are slower.
bool plan_plain(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (problem.x_dtype != DType::kFloat16) {
    if (problem.m > most_smem_x_tokens(problem, gpu) || problem.m * problem.k > 32768) return false;
  }
  // MXFP4 with several passes is faster in the ring.
  if (is_float_fp4(problem) && problem.group_size == fp4::kMxGroup && passes_of(problem, gpu, 3) > 1) return false;
  int64_t fewest = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kSmemX)); ++index) {
    const int64_t places = places_of(problem, gpu, kSmemX[index].tiles_n);
    if (places < fewest && fill_smem_x(problem, gpu, index, plan)) fewest = places;
  }
  return fewest < INT64_MAX;
}

// Fills in `plan` if this row of tiles_tma_x.inc can run the problem.
bool fill_tma_x(const Problem& problem, const Gpu& gpu, int index, Plan* plan) {
  if (!is_float_int4(problem) || problem.m <= kSmemXTokens || problem.m > kTmaXTokens) return false;
  const Config& config = kTmaX[index];
  const int ctas = static_cast<int>(std::min<int64_t>(gpu.num_sms, tiles_n(problem.n)));
  TmaXParams params;
  int shared_bytes;
  if (!tma_x_params(problem, config, ctas, gpu.shared_bytes_per_cta, &params, &shared_bytes)) return false;
  fill(problem, Family::kSm90SkinnyTmaX,
       "9 to 16 tokens of 16 bits from sm_90 on: weights stream through mma.sync past x in shared memory", config,
       index, ctas, 1, shared_bytes, plan);
  return true;
}

bool is_fused(const Problem& problem) { return problem.normed || problem.gated; }

}  // namespace

bool supports(const Problem& problem, const Gpu& gpu) {
  if (problem.batch_invariant) return false;  // the split of K depends on the number of tokens
  return runs_sm90(gpu) && (is_float_int4(problem) || is_float_fp4(problem)) && !is_split(problem);
}

bool plan_smem_x(const Problem& problem, const Gpu& gpu, Plan* plan) {
  return is_fused(problem) ? plan_normed(problem, gpu, plan) : plan_plain(problem, gpu, plan);
}

// One kernel for all weights, which is faster than one for each. The tile with the fewest n-tile slots in the CTA with
// the most passes wins.
bool plan_merged(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan) {
  if (!runs_sm90(gpu) || !is_float_int4(problem) || problem.batch_invariant) return false;
  if (problem.x_dtype != DType::kBFloat16 || problem.scale_dtype != DType::kBFloat16) return false;
  if (rows.empty() || rows.size() > kMaxParts || problem.m < 1 || problem.m > kSmemXTokens) return false;
  if (problem.normed && !norm_fits(problem, gpu)) return false;
  int64_t fewest = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kSmemX)); ++index) {
    const Config& config = kSmemX[index];
    if (problem.gated && config.tiles_n != 2) continue;
    int passes = 0;
    for (const int64_t n : problem.gated ? rows.first(1) : rows) {
      passes += passes_over_part(n, problem.gated, config.tiles_n);
    }
    const int ctas = std::min(gpu.num_sms, passes);
    const int64_t places = ceil_div(passes, ctas) * config.tiles_n;
    SmemXParams params;
    int shared_bytes;
    if (places >= fewest ||
        !smem_x_params(problem, config, ctas, gpu.shared_bytes_per_cta, &params, &shared_bytes, passes)) {
      continue;
    }
    fewest = places;
    fill(problem, Family::kSm90SkinnySmemX, "few bfloat16 tokens from sm_90 on: several weights in one kernel", config,
         index, ctas, 1, shared_bytes, plan);
  }
  return fewest < INT64_MAX;
}

// Measured to be faster where shared memory holds x and three n-tiles per pass, or where one pass is enough. A pass
// costs as much as one more n-tile.
bool plan_tma_x(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (is_shallow(problem, gpu)) return false;
  int64_t least = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kTmaX)); ++index) {
    const int64_t pass_tiles = kTmaX[index].tiles_n;
    const int64_t passes = passes_of(problem, gpu, pass_tiles), cost = passes * (pass_tiles + 1);
    const bool pays = passes == 1 || pass_tiles >= 3;
    if (pays && cost <= least && fill_tma_x(problem, gpu, index, plan)) least = cost;
  }
  return least < INT64_MAX;
}

bool plan_ring_x(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (!ring_x_serves(problem, kRingX[kMany]) || is_shallow(problem, gpu)) return false;
  const int64_t row_tiles = tiles_n(problem.n), steps = ceil_div(problem.k, kStepColumns);
  const int64_t share = row_tiles * steps / gpu.num_sms;  // n-tiles times K-steps per SM
  const bool few = problem.m <= kRingX[kFew].tokens;
  const bool is_short = share <= (few ? 100 : 64) && row_tiles <= 2 * gpu.num_sms;
  const int index = few ? (is_short ? kFewShort : kFew) : is_short ? kManyShort : kMany;

  // Pairs of CTAs split K where SMs would otherwise idle, or where enough n-tile slots would stay empty to pay for the
  // exchange after each pass.
  const auto passes = [&](int64_t clusters) { return ceil_div(ceil_div(row_tiles, clusters), kRingX[index].tiles_n); };
  const bool pays = is_short ? 2 * row_tiles <= gpu.num_sms
                             : gpu.num_sms >= 2 && 2 * passes(gpu.num_sms / 2) <= 3 * passes(gpu.num_sms);
  return fill_ring_x(problem, gpu, index, pays && steps >= 2 ? 2 : 1, plan);
}

void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all) {
  if (!supports(problem, gpu)) return;
  Candidate<Plan> candidate;
  for (int index = 0; index < static_cast<int>(std::size(kSmemX)); ++index) {
    candidate.plan = {};
    if (fill_smem_x(problem, gpu, index, &candidate.plan)) all->push_back(candidate);
  }
  for (int index = 0; index < static_cast<int>(std::size(kRingX)); ++index) {
    for (int split = 1; split <= std::min<int64_t>(2, ceil_div(problem.k, kStepColumns)); ++split) {
      candidate.plan = {};
      if (!ring_x_serves(problem, kRingX[index])) continue;
      if (fill_ring_x(problem, gpu, index, split, &candidate.plan)) all->push_back(candidate);
    }
  }
  for (int index = 0; index < static_cast<int>(std::size(kTmaX)); ++index) {
    candidate.plan = {};
    if (fill_tma_x(problem, gpu, index, &candidate.plan)) all->push_back(candidate);
  }
}

}  // namespace qao::gemm::sm90_skinny
