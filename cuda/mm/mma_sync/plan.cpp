#include "mm/mma_sync/plan.h"

#include <algorithm>

#include "common/integers.h"
#include "mm/gpu.h"
#include "mm/mma_sync/resident.h"
#include "mm/mma_sync/tile.h"
#include "mm/problem.h"
#include "mm/wgmma/plan.h"

namespace qao::mm::mma_sync {
namespace {

struct Config {
  int index;  // its row
  int64_t max_m;
  ShareKind share;
  XKind x;
  WeightKind weight;
  bool scales_x;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm, token_sum_bytes;
  // The ring by what the operands are.
  int int8_int8, int8_int4, fp8_fp8, float_int8, float_fp8;

  int ring_bytes(const Problem& problem) const {
    if (problem.weight == Format::kInt4) return int8_int4;
    if (problem.x == Format::kFloat) return problem.weight == Format::kInt8 ? float_int8 : float_fp8;
    return problem.weight == Format::kInt8 ? int8_int8 : fp8_fp8;
  }
};

template <typename Tile>
constexpr Config config_of(int index, int64_t max_m, ShareKind share, XKind x, WeightKind weight) {
  const int eight_bits = x == XKind::kQuantizes ? 0 : 1;
  return {index,
          max_m,
          share,
          x,
          weight,
          Tile::kScalesX,
          Tile::kN,
          Tile::kM,
          Tile::kWarpsK,
          Tile::kThreads / 32,
          Tile::kStages,
          Tile::kCtasPerSm,
          Tile::kTokenSumBytes,
          Tile::ring_bytes({eight_bits, Format::kInt8}),
          Tile::ring_bytes({eight_bits, Format::kInt4}),
          Tile::ring_bytes({eight_bits, Format::kFp8}),
          Tile::ring_bytes({2, Format::kInt8}),
          Tile::ring_bytes({2, Format::kFp8})};
}

constexpr int64_t kAnyM = INT64_MAX;
constexpr int kFirst = __COUNTER__ + 1;  // a row's index is its place in the list: __COUNTER__ may begin anywhere
constexpr Config kConfigs[] = {
#define QAO_TILE(max_m, share, x, weight, ...) \
  config_of<Tile<__VA_ARGS__>>(__COUNTER__ - kFirst, max_m, share, x, weight),
#include "mm/mma_sync/tiles.inc"
#undef QAO_TILE
};

constexpr int64_t kManyTokens = 64;  // above, arithmetic takes longer than reading W

// Columns whose products of int8 surely fit an int32 sum.
constexpr int64_t kInt32Columns = 65536;

// CTAs that share an output tile. Splitting costs a second kernel and a trip through memory, so it must fill SMs that
// would idle (with many tokens, halves of SMs), and leave every slice enough K-tiles to fill its pipeline; or it keeps
// int32 sums from overflowing.
int choose_split(const Config& config, const Problem& problem, int64_t tiles, int64_t k_steps, int num_sms) {
  int64_t least = 1;
  if (problem.x == Format::kInt8 && problem.weight == Format::kInt8) {
    least = ceil_div(k_steps, config.warps_k * (kInt32Columns / kTileK));
  }
  const int64_t room = num_sms * (problem.m > kManyTokens ? config.ctas_per_sm : 1);
  if (2 * tiles > room) return static_cast<int>(least);
  const int64_t deepest = k_steps / (static_cast<int64_t>(config.warps_k) * config.stages);
  return static_cast<int>(std::max(least, std::clamp<int64_t>(std::min(room / tiles, deepest), 1, 32)));
}

// Shared memory a CTA may take: the others of the row need their place too. A multiprocessor has 1 KB more than one CTA
// may take, and every CTA costs 1 KB.
int64_t shared_room(const Config& config, const Problem& problem, const Gpu& gpu) {
  const int all = gpu.shared_bytes_per_cta + 1024, ctas = all / (config.ring_bytes(problem) + 1024);
  return ctas == 0 ? 0 : all / std::min(ctas, config.ctas_per_sm) - 1024;
}

struct Choice {
  const Config* config = nullptr;
  int64_t ctas = 0;  // of one part of K
  bool runs = false;
  int64_t shared_bytes = 0;
  int sums_at = 0, sum_places = 1;
  int split_k = 1;
};

// Shared memory for the ring, the sums and what of x stays; false if a CTA has not so much.
bool lay_out(const Problem& problem, const Gpu& gpu, bool quantizes, bool single_pass, Choice* choice) {
  const Config& config = *choice->config;
  const int64_t room = shared_room(config, problem, gpu);
  const int ring = config.ring_bytes(problem);
  const int sums = config.token_sum_bytes * static_cast<int>(std::clamp<int64_t>(problem.m, 1, config.tile_m));
  choice->sums_at = single_pass ? 0 : ring;
  for (choice->sum_places = single_pass ? 1 : 2; choice->sum_places > 0; --choice->sum_places) {
    choice->shared_bytes = single_pass ? std::max(ring, sums) : ring + choice->sum_places * sums;
    if (quantizes) {
      const int behind_ring = static_cast<int>(choice->shared_bytes) - ring;
      choice->shared_bytes =
          resident_at(ring, behind_ring, config.stages, static_cast<int>(problem.m) * float_row_bytes(problem)) +
          resident_of(problem).bytes();
    }
    if (choice->shared_bytes <= room) return true;
  }
  return false;
}

constexpr int64_t kLeastPrefetch = 16384, kMostPrefetch = 32768;  // bytes of W, a CTA
constexpr int64_t kMaxQuantizedK = 1 << 18;                       // more would fit no GPU
constexpr int kMaxUnsplit = 2;  // parts of K that a product gives up for quantising x itself

// Floats of x that a CTA can quantise in the time that a kernel for x alone would take; int4 wants sums of groups too.
int64_t most_floats(const Config& config, Format weight) {
  return config.warps * (weight == Format::kInt4 ? 1792 : config.warps == 8 ? 3072 : 2048);
}

// Whether a row serves runs of so many row tiles, or tiles.
bool serves(const Config& config, int64_t run, bool one_wave, int64_t k) {
  const bool one_pass = run <= config.tile_n / kTileN;
  switch (config.share) {
    case ShareKind::kOnePass:
      return one_pass;
    case ShareKind::kOneShortPass:
      return one_pass && k <= kShortK;
    case ShareKind::kOneTinyPass:
      return one_pass && k <= kTinyK;
    case ShareKind::kLongRun:
      return run >= kLongRun;
    case ShareKind::kOneWave:
      return one_wave;
    case ShareKind::kRun:
    case ShareKind::kTile:
      return true;
  }
  return false;
}

// What a multiprocessor takes for runs of so many row tiles, in half a row tile: the places of all passes, empty or
// not, and what a pass begins and ends with, which is as much as half a row tile of eight bits, or one of four.
int64_t run_cost(const Config& config, Format weight, int64_t run) {
  const int64_t places = config.tile_n / kTileN;
  return config.ctas_per_sm * ceil_div(run, places) * (2 * places + (weight == Format::kInt4 ? 2 : 1));
}

// The row that tiles.inc says for the problem on this GPU; none is possible where the product is to quantise x.
Choice choose(const Problem& problem, const Gpu& gpu, bool quantizes) {
  const int64_t m = std::max<int64_t>(problem.m, 1);
  const int64_t k_steps = ceil_div(problem.k, kTileK) * (is_split(problem) ? kFloat32Parts : 1);
  Choice best;
  int64_t best_cost = 0;
  for (const Config& config : kConfigs) {
    if (best.config != nullptr && (config.share != ShareKind::kRun || config.max_m != best.config->max_m)) continue;
    if (m > config.max_m || quantizes != (config.x == XKind::kQuantizes) || !serves(config.weight, problem.weight))
      continue;
    if (!quantizes && !serves(config.x, problem.x == Format::kFloat)) continue;
    // CTAs that have all tokens share the rows of W out among them where shared memory allows. Others are tiles.
    const int64_t row_tiles = ceil_div(problem.n, kTileN), row_blocks = ceil_div(problem.n, config.tile_n);
    const int64_t slots = gpu.num_sms * config.ctas_per_sm, runs = std::min(row_tiles, slots);
    const int64_t run = ceil_div(row_tiles, runs);
    if (!serves(config, run, row_blocks <= slots, problem.k)) continue;
    for (bool shares : {true, false}) {
      if (shares && (m > config.tile_m || !is_run(config.share))) continue;
      Choice choice{&config};
      choice.runs = shares;
      choice.ctas = shares ? runs : row_blocks * ceil_div(m, config.tile_m);
      choice.split_k = choose_split(config, problem, choice.ctas, k_steps, gpu.num_sms);
      if (quantizes) {
        // Every warp has one token, and a part of K would not know the range of the others.
        if (m > config.warps || problem.k > kMaxQuantizedK || choice.split_k > kMaxUnsplit) continue;
        if (m * problem.k > most_floats(config, problem.weight)) continue;
        choice.split_k = 1;
      }
      const bool single_pass = !shares || run <= config.tile_n / kTileN;
      if (!lay_out(problem, gpu, quantizes, single_pass, &choice)) continue;
      if (config.share != ShareKind::kRun) return choice;
      const int64_t cost = shares ? run_cost(config, problem.weight, run) : INT64_MAX;
      if (best.config == nullptr || cost < best_cost) best = choice, best_cost = cost;
      break;
    }
  }
  return best;
}

// What of W a CTA brings into the L2 cache before it waits for the previous kernel: the more, the longer it will take.
// Where few bytes of W come beside an x that is yet to be quantised, x would be late.
int prefetch_bytes(const Problem& problem, const Choice& choice, bool quantizes) {
  const bool packed = problem.weight == Format::kInt4;
  const bool possible = choice.runs && choice.split_k == 1 && (packed || problem.weight_aligned);
  if (!possible || (packed && quantizes)) return 0;
  const int64_t eighth = weight_bytes(problem) / choice.ctas / 8;
  return static_cast<int>(std::clamp(eighth / 1024 * 1024, kLeastPrefetch, kMostPrefetch));
}

// Whether the next kernel may start as soon as all CTAs run: not where more of its CTAs find room on one multiprocessor
// than on another, which would last as long as it does.
bool lets_next_early(const Config& config, const Choice& choice, const Gpu& gpu) {
  return config.ctas_per_sm == 1 ||
         (config.ctas_per_sm + 1) * (choice.shared_bytes + 1024) > gpu.shared_bytes_per_cta + 1024;
}

// Why a product cannot quantise such an x itself; null if at most x's size is against it.
const char* against_quantizing(const Problem& problem) {
  if (problem.m > ResidentX::kMaxTokens) return "more than a few tokens";
  if (!problem.x_aligned) return "rows of x are not aligned to 16 bytes";
  if (problem.x_scaling == Scaling::kTensor && !problem.static_scale && problem.m > 1) return "tokens share a scale";
  return nullptr;
}

const char* mma_sync_name(const Problem& problem, const Config& config, bool fp8_mma) {
  if (problem.x == Format::kInt8) return "mma.sync s8";
  if (problem.x == Format::kFp8) return fp8_mma ? "mma.sync e4m3" : "mma.sync f16";
  const bool float16 = problem.x_dtype == DType::kFloat16 || (problem.weight == Format::kFp8 && config.scales_x);
  return float16 ? "mma.sync f16" : "mma.sync bf16";
}

// Fills in a plan whose row is chosen; null where nothing fits.
bool fill(const Problem& problem, const Gpu& gpu, Body body, Plan* plan) {
  Choice choice;
  if (problem.quantizes_x) {
    const char* against = against_quantizing(problem);
    if (against == nullptr) choice = choose(problem, gpu, true);
    plan->quantizes_x = choice.config != nullptr;
    plan->quantizer = against != nullptr  ? against
                      : plan->quantizes_x ? "few tokens: every CTA quantises x"
                                          : "x is too large for every CTA to quantise, or K is split";
  }
  if (choice.config == nullptr) choice = choose(problem, gpu, false);
  const Config* config = choice.config;
  if (config == nullptr) return false;
  const bool fp8_mma = body == Body::kMmaSyncFp8;
  plan->body = body;
  plan->reason = is_hopper(gpu) ? wgmma::against(problem, gpu)
                 : fp8_mma      ? "mma.sync on fp8 tensor cores"
                                : "mma.sync serves every GPU from sm_80";
  plan->instruction = mma_sync_name(problem, *config, fp8_mma);
  plan->config = config->index;
  plan->tile_n = config->tile_n;
  plan->tile_m = config->tile_m;
  plan->warps = config->warps;
  plan->stages = config->stages;
  plan->runs = choice.runs;
  plan->split_k = choice.split_k;
  plan->ctas = choice.ctas * plan->split_k;
  plan->shared_bytes = choice.shared_bytes;
  plan->sums_at = choice.sums_at;
  plan->sum_places = choice.sum_places;
  plan->next_early = lets_next_early(*config, choice, gpu);
  plan->prefetch_bytes = prefetch_bytes(problem, choice, plan->quantizes_x);
  plan->workspace_bytes = workspace_of(problem, *plan).bytes;
  return true;
}

}  // namespace

bool supports(const Problem& problem, const Gpu&) { return !is_float_int4(problem); }
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan) { return fill(problem, gpu, Body::kMmaSync, plan); }

bool supports_fp8(const Problem& problem, const Gpu& gpu) { return problem.x == Format::kFp8 && has_fp8_mma(gpu); }
bool plan_fp8(const Problem& problem, const Gpu& gpu, Plan* plan) {
  return fill(problem, gpu, Body::kMmaSyncFp8, plan);
}

}  // namespace qao::mm::mma_sync
