// Which kernel runs a problem, and how. Pure host code: a function of the problem and the GPU's numbers, nothing else.
#include <algorithm>

#include "common/integers.h"
#include "int4_mm/decode.h"
#include "int4_mm/few.h"
#include "int4_mm/shared.h"
#include "int4_mm/sm90.h"
#include "int4_mm/tile.h"
#include "int4_mm/workspace.h"
#include "qao/int4_mm.h"

namespace qao::int4_mm {
namespace {

struct Config {
  const char* kernel;
  int index;  // among the kernel's rows
  int64_t max_m;
  bool one_wave;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm;
  int64_t shared_bytes;
};

template <typename Tile>
constexpr Config config_of(int index, int64_t max_m, bool one_wave) {
  return {"sm80",
          index,
          max_m,
          one_wave,
          Tile::kN,
          Tile::kM,
          Tile::kWarpsK,
          Tile::kThreads / 32,
          Tile::kStages,
          Tile::kCtasPerSm,
          Tile::kSharedBytes};
}

constexpr int64_t kAnyM = INT64_MAX;
constexpr int kFirstSm80 = __COUNTER__ + 1;  // a row's index is its place in the list: __COUNTER__ may begin anywhere
constexpr Config kSm80[] = {
#define QAO_SM80(max_m, one_wave, ...) config_of<Tile<__VA_ARGS__>>(__COUNTER__ - kFirstSm80, max_m, one_wave),
#include "int4_mm/configs.inc"
#undef QAO_SM80
};

// On Hopper the body for many tokens wins above: beside 16 bits where a multiprocessor has more than two row tiles
// already from 9 on.
int64_t largest_mma_sync_m(const Problem& problem, const Gpu& gpu) {
  return problem.x_dtype != DType::kFloat32 && tiles_n(problem.n) > 2 * gpu.num_sms ? 8 : 16;
}

// The first row that serves the problem on this GPU; null if none does.
const Config* first_sm80(const Problem& problem, const Gpu& gpu) {
  for (const Config& config : kSm80) {
    if (problem.m > config.max_m) continue;
    if (config.shared_bytes > gpu.shared_bytes_per_cta) continue;
    if (config.one_wave && ceil_div(problem.n, config.tile_n) > gpu.num_sms * config.ctas_per_sm) continue;
    return &config;
  }
  return nullptr;
}

int64_t output_tiles(const Config& config, const Problem& problem) {
  return ceil_div(problem.n, config.tile_n) * ceil_div(std::max<int64_t>(problem.m, 1), config.tile_m);
}

// CTAs that share an output tile. Splitting costs a second kernel and a trip through memory, so it must fill SMs that
// would idle, and leave every slice enough K-tiles to fill its pipeline.
int choose_split(const Config& config, int64_t tiles, int64_t k_steps, int num_sms) {
  if (2 * tiles > num_sms) return 1;
  const int64_t fill = num_sms / tiles;
  const int64_t deepest = k_steps / (static_cast<int64_t>(config.warps_k) * config.stages);
  return static_cast<int>(std::clamp<int64_t>(std::min(fill, deepest), 1, 32));
}

// Rows of decode.inc, as they measured: for weights of which a multiprocessor has little, and for all others.
constexpr int kFewShort = 0, kFew = 1, kManyShort = 2, kMany = 3;

// Fills in `plan` if the body for few tokens serves the problem with this row, with `split` CTAs that share row tiles.
bool fill_decode(const Problem& problem, const Gpu& gpu, int index, int split, Plan* plan) {
  const DecodeConfig& config = kDecode[index];
  const int clusters = static_cast<int>(std::min<int64_t>(gpu.num_sms / split, tiles_n(problem.n)));
  DecodeParams params;
  int shared_bytes;
  if (!decode_params(problem, config, split, clusters, decode_shared_limit(config, gpu.shared_bytes_per_cta), &params,
                     &shared_bytes)) {
    return false;
  }
  plan->kernel = "decode";
  plan->reason = "at most 16 bfloat16 tokens on Hopper: weights stream through mma.sync";
  plan->instruction = "mma.sync bf16";
  plan->config = index;
  plan->tile_n = config.tiles_n * kTileN;
  plan->tile_m = static_cast<int>(config.max_m);
  plan->warps = config.warps;
  plan->stages = params.stages;
  plan->split_k = split;
  plan->ctas = static_cast<int64_t>(clusters) * split;
  plan->shared_bytes = shared_bytes;
  plan->workspace_bytes = 0;
  return true;
}

bool decode_serves(const Problem& problem, const Gpu& gpu, const DecodeConfig& config) {
  return gpu.compute_capability == 90 && problem.x_dtype == DType::kBFloat16 && problem.m >= 1 &&
         problem.m <= config.max_m;
}

// More than eight tokens of weights with many rows and hardly any columns, such as the head of a small language model,
// are the many-token body's.
bool is_shallow(const Problem& problem, const Gpu& gpu) {
  return problem.m > 8 && problem.k <= 8 * kStepColumns && tiles_n(problem.n) >= 8 * gpu.num_sms && problem.x_aligned;
}

bool plan_decode(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (!decode_serves(problem, gpu, kDecode[kMany]) || is_shallow(problem, gpu)) return false;
  const int64_t row_tiles = tiles_n(problem.n), steps = ceil_div(problem.k, kStepColumns);
  const int64_t share = row_tiles * steps / gpu.num_sms;  // row tiles times K-steps of a multiprocessor
  const bool is_short = share <= 64 && row_tiles <= 2 * gpu.num_sms, few = problem.m <= kDecode[kFew].max_m;
  const int index = few ? (is_short ? kFewShort : kFew) : is_short ? kManyShort : kMany;

  // Two CTAs that share row tiles, each with half of K, where that leaves multiprocessors, or so many places of passes
  // empty that it pays for the exchange of every pass.
  const auto passes = [&](int64_t clusters) { return ceil_div(ceil_div(row_tiles, clusters), kDecode[index].tiles_n); };
  const bool pays = is_short ? 2 * row_tiles <= gpu.num_sms
                             : gpu.num_sms >= 2 && 2 * passes(gpu.num_sms / 2) <= 3 * passes(gpu.num_sms);
  return fill_decode(problem, gpu, index, pays && steps >= 2 ? 2 : 1, plan);
}

// Fills in `plan` if the body for at most eight tokens can serve the problem.
bool fill_few(const Problem& problem, const Gpu& gpu, int index, Plan* plan) {
  const bool half = problem.x_dtype == DType::kFloat16;
  if (gpu.compute_capability != 90 || problem.x_dtype == DType::kFloat32 || (half && problem.normed)) return false;
  if (problem.m < 1 || problem.m > kFewTokens) return false;
  const FewConfig& config = kFewConfigs[index];
  const int ctas = static_cast<int>(std::min<int64_t>(gpu.num_sms, tiles_n(problem.n) >> problem.gated));
  FewParams params;
  int shared_bytes;
  if (!few_params(problem, config, ctas, gpu.shared_bytes_per_cta, &params, &shared_bytes)) return false;
  plan->kernel = "few";
  plan->reason = "at most 8 tokens of 16 bits on Hopper: weights stream through mma.sync past x in shared memory";
  plan->instruction = half ? "mma.sync f16" : "mma.sync bf16";
  plan->config = index;
  plan->tile_n = config.tiles_n * kTileN;
  plan->tile_m = kFewTokens;
  plan->warps = config.warps;
  plan->stages = config.stages;
  plan->ctas = ctas;
  plan->shared_bytes = shared_bytes;
  return true;
}

// Passes over row tiles, `pass_tiles` at a time, of the CTA that has most.
int64_t passes_of(const Problem& problem, const Gpu& gpu, int64_t pass_tiles) {
  return ceil_div(ceil_div(tiles_n(problem.n), gpu.num_sms), pass_tiles);
}
// Row tiles that they have room for.
int64_t places_of(const Problem& problem, const Gpu& gpu, int64_t pass_tiles) {
  return passes_of(problem, gpu, pass_tiles) * pass_tiles;
}

// The same body of a normed problem, for as many tokens as were measured to pay. Two row tiles a pass are gate and up.
bool plan_normed(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (!problem.normed || !problem.x_aligned || problem.k % kStepColumns != 0) return false;
  if (problem.gated && problem.n % (2 * kTileN) != 0) return false;
  const int64_t largest_x = tiles_n(problem.n) >= 8 * gpu.num_sms ? 32768 : 8192;  // elements
  if (problem.m * problem.k > largest_x) return false;
  int best = -1;
  for (int index = 0; index < static_cast<int>(std::size(kFewConfigs)); ++index) {
    if (problem.gated && kFewConfigs[index].tiles_n != 2) continue;
    const auto places = [&](int row) { return places_of(problem, gpu, kFewConfigs[row].tiles_n); };
    if (best < 0 || places(index) < places(best)) best = index;
  }
  if (best < 0 || !fill_few(problem, gpu, best, plan)) return false;
  plan->reason = problem.gated ? "few bfloat16 tokens on Hopper: RMSNorm and SiLU-multiply within the product"
                               : "few bfloat16 tokens on Hopper: RMSNorm within the product";
  return true;
}

// Tokens of bfloat16 for which the body for at most eight was measured to pay: the more row tiles a multiprocessor has,
// the more; three row tiles are one pass of it.
int64_t most_few_tokens(const Problem& problem, const Gpu& gpu) {
  const int64_t of_sm = ceil_div(tiles_n(problem.n), gpu.num_sms);
  return of_sm > 32 ? 8 : of_sm > 8 ? 5 : of_sm > 6 ? 4 : of_sm == 3 ? 3 : 2;
}

// Not where warps have hardly a K-step each, or x, which every CTA waits for, is large. For float16 always: the
// portable kernels are slower.
bool plan_few(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (problem.x_dtype != DType::kFloat16) {
    if (problem.m > most_few_tokens(problem, gpu) || problem.k < 24 * kStepColumns || problem.m * problem.k > 32768)
      return false;
  }
  int64_t fewest = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kFewConfigs)); ++index) {
    const int64_t places = places_of(problem, gpu, kFewConfigs[index].tiles_n);
    if (places < fewest && fill_few(problem, gpu, index, plan)) fewest = places;
  }
  return fewest < INT64_MAX;
}

// Fills in `plan` if the body for 9 to 16 tokens with x in shared memory can serve the problem with this row.
bool fill_shared(const Problem& problem, const Gpu& gpu, int index, Plan* plan) {
  const bool half = problem.x_dtype == DType::kFloat16;
  if (gpu.compute_capability != 90 || problem.x_dtype == DType::kFloat32) return false;
  if (problem.m <= kFewTokens || problem.m > kSharedTokens) return false;
  const SharedConfig& config = kShared[index];
  const int ctas = static_cast<int>(std::min<int64_t>(gpu.num_sms, tiles_n(problem.n)));
  SharedParams params;
  int shared_bytes;
  if (!shared_params(problem, config, ctas, gpu.shared_bytes_per_cta, &params, &shared_bytes)) return false;
  plan->kernel = "shared";
  plan->reason = "9 to 16 tokens of 16 bits on Hopper: weights stream through mma.sync past x in shared memory";
  plan->instruction = half ? "mma.sync f16" : "mma.sync bf16";
  plan->config = index;
  plan->tile_n = config.tiles_n * kTileN;
  plan->tile_m = kSharedTokens;
  plan->warps = config.warps;
  plan->stages = config.stages;
  plan->ctas = ctas;
  plan->shared_bytes = shared_bytes;
  return true;
}

// As measured: wherever three row tiles a pass fit beside x, or one pass does; a pass costs as much as a place.
bool plan_shared(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (is_shallow(problem, gpu)) return false;
  int64_t least = INT64_MAX;
  for (int index = 0; index < static_cast<int>(std::size(kShared)); ++index) {
    const int64_t pass_tiles = kShared[index].tiles_n;
    const int64_t passes = passes_of(problem, gpu, pass_tiles), cost = passes * (pass_tiles + 1);
    const bool pays = passes == 1 || pass_tiles >= 3;
    if (pays && cost <= least && fill_shared(problem, gpu, index, plan)) least = cost;
  }
  return least < INT64_MAX;
}

}  // namespace

Status plan(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (gpu.compute_capability < 80) {
    return Status::error("GPUs of compute capability " + std::to_string(gpu.compute_capability / 10) + "." +
                             std::to_string(gpu.compute_capability % 10) + " are not supported; 8.0 is the lowest",
                         "Run on a newer GPU, or on the CPU");
  }
  *plan = Plan{};
  if (problem.normed || problem.gated) {
    if (plan_normed(problem, gpu, plan)) return {};
    return Status::error("no kernel makes RMSNorm and this product at once", "Ask fuses_norm() first");
  }
  if (plan_few(problem, gpu, plan) || plan_shared(problem, gpu, plan) || plan_decode(problem, gpu, plan)) return {};
  const bool split_x = problem.x_dtype == DType::kFloat32;  // its parts are always aligned
  const int64_t k_steps = tiles_k(problem.k) * (split_x ? kFloat32Parts : 1);
  const char* reason = "mma.sync serves every GPU from sm_80";
  if (gpu.compute_capability == 90) {
    if (problem.m <= largest_mma_sync_m(problem, gpu)) {
      reason = "few tokens: mma.sync with K split over warps";
    } else if (!problem.x_aligned && !split_x) {
      reason = "the copy engine needs x aligned to 16 bytes";
    } else {
      mm8::Plan sm90;
      if (Status status = mm8::plan(sm90_problem(problem), gpu, &sm90); !status.ok()) return status;
      *plan = plan_as<Plan>(sm90);
      return {};
    }
  }
  const Config* config = first_sm80(problem, gpu);
  if (config == nullptr) {
    return Status::error("no kernel fits the GPU's " + std::to_string(gpu.shared_bytes_per_cta) +
                         " bytes of shared memory");
  }
  const int64_t tiles = output_tiles(*config, problem);
  plan->kernel = config->kernel;
  plan->reason = reason;
  plan->instruction = problem.x_dtype == DType::kFloat16 ? "mma.sync f16" : "mma.sync bf16";
  plan->config = config->index;
  plan->tile_n = config->tile_n;
  plan->tile_m = config->tile_m;
  plan->warps = config->warps;
  plan->stages = config->stages;
  plan->split_k = choose_split(*config, tiles, k_steps, gpu.num_sms);
  plan->ctas = tiles * plan->split_k;
  plan->shared_bytes = config->shared_bytes;
  plan->workspace_bytes = workspace_of(problem, plan->split_k).bytes;
  return {};
}

bool fuses_norm(const Problem& problem, const Gpu& gpu) {
  Plan plan;
  return plan_normed(problem, gpu, &plan);
}

std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu) {
  std::vector<Candidate<Plan>> all;
  for (int index = 0; index < static_cast<int>(std::size(kFewConfigs)); ++index) {
    if (Candidate<Plan> few; fill_few(problem, gpu, index, &few.plan)) all.push_back(few);
  }
  for (int index = 0; index < static_cast<int>(std::size(kDecode)); ++index) {
    for (int split = 1; split <= std::min<int64_t>(2, ceil_div(problem.k, kStepColumns)); ++split) {
      Candidate<Plan> candidate;
      if (!decode_serves(problem, gpu, kDecode[index])) continue;
      if (fill_decode(problem, gpu, index, split, &candidate.plan)) all.push_back(candidate);
    }
  }
  for (int index = 0; index < static_cast<int>(std::size(kShared)); ++index) {
    if (Candidate<Plan> shared; fill_shared(problem, gpu, index, &shared.plan)) all.push_back(shared);
  }
  Candidate<Plan> other;
  Gpu portable = gpu;
  if (gpu.compute_capability == 90) portable.compute_capability = 80;
  if (plan(problem, portable, &other.plan).ok()) all.push_back(other);
  if (gpu.compute_capability != 90) return all;
  for (const Candidate<mm8::Plan>& sm90 : mm8::candidates(sm90_problem(problem), gpu)) {
    all.push_back({plan_as<Plan>(sm90.plan), sm90.operands, sm90.counts});
  }
  return all;
}

std::string to_string(const Plan& plan) {
  using std::to_string;
  return std::string(plan.kernel) + " tile " + to_string(plan.tile_n) + "x" + to_string(plan.tile_m) + " warps " +
         to_string(plan.warps) + " stages " + to_string(plan.stages) + " split_k " + to_string(plan.split_k) +
         (plan.splits_last ? " splits_last" : "") + " ctas " + to_string(plan.ctas) + " shared " +
         to_string(plan.shared_bytes) + " workspace " + to_string(plan.workspace_bytes) + " (" + plan.reason + ")";
}

}  // namespace qao::int4_mm
