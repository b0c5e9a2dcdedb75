// The Hopper part of plan(): the row, the cluster and the split of K of least expected time.
#include "mm8/plan_sm90.h"

#include <algorithm>
#include <iterator>

#include "common/integers.h"
#include "mm8/sm90_tile.h"
#include "mm8/workspace.h"

namespace qao::mm8::sm90 {
namespace {

constexpr int kTokens[] = {
#define QAO_SM80(...)
#define QAO_SM90(tokens) tokens,
#include "mm8/configs.inc"
#undef QAO_SM90
#undef QAO_SM80
};

// CTAs of a cluster must find room in one part of the chip, so large clusters cannot fill it.
bool clusters_fit(int64_t ctas, int cluster, int64_t slots) {
  return cluster == 1 || (cluster == 2 ? ctas <= slots : ctas * 4 <= slots * 3);
}

// What the Hopper kernels cost: a row for each kind of operands and number of tokens.
enum class Operands {
  kFloatInt4,
  kFloatEightBits,
  kFloatFolded,
  kInt8Int8,
  kFp8Fp8,
  kFp8Fp8Blocks,
  kInt8Int4,
  kInt8Int4Symmetric,
  kInt8Int4Channel,
  kFp8Int4,
};
struct Cost {
  Operands operands;
  int tokens;
  const char* name;
  Terms costs;
};
constexpr Cost kCosts[] = {
#define QAO_MEMORY(...)
#define QAO_COST(operands, tokens, ...) {Operands::operands, tokens, #operands, {__VA_ARGS__}},
#include "mm8/sm90_costs.inc"
#undef QAO_COST
#undef QAO_MEMORY
};
#define QAO_MEMORY(...) constexpr Memory kMemory{__VA_ARGS__};
#define QAO_COST(...)
#include "mm8/sm90_costs.inc"
#undef QAO_COST
#undef QAO_MEMORY

Operands operands_of(const Problem& p, const Traits& traits) {
  using enum Operands;
  if (traits.float_x) return traits.folds ? kFloatFolded : traits.packed ? kFloatInt4 : kFloatEightBits;
  if (!traits.packed) {
    return p.weight_scaling == Scaling::kBlock ? kFp8Fp8Blocks : p.x == Format::kFp8 ? kFp8Fp8 : kInt8Int8;
  }
  if (p.x == Format::kFp8) return kFp8Int4;
  return p.groups() == 1 ? kInt8Int4Channel : p.has_zeros ? kInt8Int4 : kInt8Int4Symmetric;
}

// Null: plan() does not take this tile.
const Cost* cost_of(const Problem& problem, int tokens) {
  const Operands operands = operands_of(problem, traits_of(problem, tokens));
  for (const Cost& row : kCosts) {
    if (row.operands == operands && row.tokens == tokens) return &row;
  }
  return nullptr;
}

struct Choice {
  int row = -1, share = 1, split = 1;
  int per_sm = 1;  // CTAs that share a multiprocessor
  int64_t ctas = 0;
  Terms counts{};
};

constexpr double kSharedKTile = 1.95;  // times as long as one alone

// Calls visit with every row, cluster and split that serve the problem.
template <typename Visit>
void for_each_choice(const Problem& problem, const Gpu& gpu, const Visit& visit) {
  for (int row = 0; row < static_cast<int>(std::size(kTokens)); ++row) {
    const int tokens = kTokens[row];
    const Traits traits = traits_of(problem, tokens);
    if (!traits.serves(tokens)) continue;
    const int64_t steps = ceil_div(problem.k, traits.float_x ? 64 : 128) * (is_split(problem) ? kFloat32Parts : 1);
    // Large tiles rather fetch x for two CTAs at once.
    for (int share = tokens > 128 ? 2 : 1; share >= 1; --share) {
      const int64_t tiles = ceil_div(problem.n, share * kTileN) * share * ceil_div(problem.m, tokens);
      for (int split = 1; split <= std::min<int64_t>(kMaxCluster / share, steps); ++split) {
        for (int per_sm = 1; per_sm <= traits.ctas_per_sm(tokens); ++per_sm) {
          const int64_t ctas = tiles * split, slots = gpu.num_sms * per_sm;
          if (split > 1 && !clusters_fit(ctas, split * share, slots)) continue;
          const double waves = static_cast<double>(ceil_div(ctas, slots));
          const double k_tiles = static_cast<double>(ceil_div(steps, split)) * (per_sm == 1 ? 1 : kSharedKTile);
          const double parts = split > 1 ? split : 0;
          visit(Choice{row, share, split, per_sm, ctas, {waves * k_tiles, waves, split > 1 ? 1.0 : 0.0, parts}});
        }
      }
    }
  }
}

void fill(const Problem& problem, const Gpu& gpu, const Choice& choice, Plan* plan) {
  const int tokens = kTokens[choice.row];
  const Traits traits = traits_of(problem, tokens);
  const Stage stage(traits, tokens);
  plan->kernel = "sm90";
  plan->reason = "many tokens on Hopper: wgmma";
  plan->instruction = problem.x == Format::kInt8           ? "wgmma s8"
                      : problem.x == Format::kFp8          ? "wgmma e4m3"
                      : problem.x_dtype == DType::kFloat16 ? "wgmma f16"
                                                           : "wgmma bf16";
  plan->config = choice.row;
  plan->tile_n = choice.share * kTileN;
  plan->tile_m = tokens;
  plan->warps = (kConsumerThreads + kProducerThreads) / 32;
  plan->stages = stage.count;
  // All of a multiprocessor's shared memory keeps other CTAs away.
  plan->shared_bytes = choice.per_sm < traits.ctas_per_sm(tokens) ? kMaxSharedBytes : stage.total;
  plan->split_k = choice.split;
  const int64_t slots = gpu.num_sms * choice.per_sm;
  plan->ctas = choice.split > 1 ? choice.ctas : std::min<int64_t>(choice.ctas, slots / choice.share * choice.share);
  plan->workspace_bytes = workspace_of(problem, 1).bytes;  // clusters add up in shared memory
}

}  // namespace

const char* against(const Problem& problem) {
  if (!problem.x_aligned && !problem.quantizes_x && !is_split(problem))
    return "the copy engine needs x aligned to 16 bytes";
  if (problem.weight != Format::kInt4 && !problem.weight_aligned) {
    return "the copy engine needs rows of W aligned to 16 bytes";
  }
  if (problem.x == Format::kInt8 && problem.k > sm90::kMaxIntegerK) return "int32 sums over all of K could overflow";
  return nullptr;
}

void plan(const Problem& problem, const Gpu& gpu, Plan* plan) {
  const double bytes = static_cast<double>(problem.n * problem.k) * (problem.weight == Format::kInt4 ? 0.5 : 1);
  Choice best;
  double least = 0;
  int row = -1;
  const Cost* cost = nullptr;
  for_each_choice(problem, gpu, [&](const Choice& choice) {
    if (choice.row != row) cost = cost_of(problem, kTokens[row = choice.row]);
    if (cost == nullptr) return;
    const double time = microseconds(choice.counts, cost->costs, bytes, kMemory);
    if (best.row >= 0 && time >= least) return;
    best = choice;
    least = time;
  });
  fill(problem, gpu, best, plan);
}

void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all) {
  if (against(problem) != nullptr) return;
  for_each_choice(problem, gpu, [&](const Choice& choice) {
    Candidate<Plan>& candidate = all->emplace_back();
    fill(problem, gpu, choice, &candidate.plan);
    if (const Cost* cost = cost_of(problem, candidate.plan.tile_m)) candidate.operands = cost->name;
    candidate.counts = choice.counts;
  });
}

}  // namespace qao::mm8::sm90
