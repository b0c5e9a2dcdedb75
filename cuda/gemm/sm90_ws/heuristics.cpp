// Heuristics of the WGMMA kernels: tile, cluster and split of K with the least expected time.
#include "gemm/sm90_ws/heuristics.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/heuristics.h"
#include "gemm/sm90_ws/cost_model.h"
#include "gemm/sm90_ws/kernel_traits.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {
namespace {

// CTAs that run at once. A cluster must fit in one GPC, so large clusters cannot fill the GPU.
int64_t slots_of(const Gpu& gpu, int cluster) { return cluster > 2 ? gpu.num_sms * 3 / 4 : gpu.num_sms; }

// Whether K is so long that split-K in a cluster beats mma.sync for any number of tokens: with few rows of W, mma.sync
// leaves a third of the SMs idle. Where mma.sync would quantize x, WGMMA must also make up for the separate
// quantization kernel.
bool shares_long_k(const Problem& problem, const Gpu& gpu) {
  const int64_t tiles = int4::tiles_n(problem.n);
  const bool packed = is_packed(problem.weight), saves_kernel = sm80_mma::quantizes(problem, gpu);
  const bool few_rows = 3 * tiles <= 2 * gpu.num_sms;
  if (problem.x == Format::kFp8) {
    const int64_t long_k = !few_rows ? 16384 : saves_kernel ? 8192 : 6144;
    return tiles <= gpu.num_sms && problem.k >= long_k;
  }
  if (!few_rows) return false;
  // mma.sync reads int8 weights as fast with fewer SMs, but in tiles of 32 tokens.
  if (problem.x == Format::kInt8)
    return problem.k >= (problem.m > 16 ? 6144 : !packed ? 32768 : saves_kernel ? 24576 : 8192);
  return !packed && !is_split(problem) && problem.k >= (problem.weight == Format::kFp8 ? 12288 : 24576);
}

// The most tokens at which mma.sync is faster. `run`: row tiles per SM.
int64_t largest_mma_sync_m(const Problem& problem, const Gpu& gpu) {
  const bool int4 = is_packed(problem.weight), blocks = has_blocks(problem);
  const int64_t tiles = int4::tiles_n(problem.n), run = ceil_div(tiles, gpu.num_sms);
  const bool one_pass = run <= 2, short_k = problem.k <= kShortK;
  if (shares_long_k(problem, gpu)) return 0;
  switch (problem.x) {
    case Format::kFloat:
      if (int4) return !is_split(problem) && tiles > 2 * gpu.num_sms ? 8 : 16;
      // The 32-token tile is not instantiated with promotion, which blocks and float32 x need: mma.sync serves twice as
      // many tokens.
      if (run == 1 && !short_k && !blocks && !is_split(problem)) return 8;  // WGMMA uses split-K in a cluster
      return (problem.weight == Format::kInt8 ? 32 : 16) / (blocks || is_split(problem) ? 1 : 2);
    case Format::kInt8:
      // Passes of mma.sync over int4 have four row tiles; from 11 per SM on, two CTAs per SM have eight each.
      if (int4) return one_pass && short_k ? 32 : run <= 4 || run > 10 ? 16 : 8;
      return one_pass ? 32 : run < kLongRun ? 16 : 8;
    default:
      if (int4) return run <= 3 ? 16 : 8;
      return blocks && short_k && one_pass ? 16 : 8;
  }
}

struct Choice {
  int row = -1, split = 1;
  int tile_rows = 0;
  int64_t ctas = 0;
  bool splits_last = false;
  Terms counts{};
  int slices = 1;           // of K, added by a second kernel
  double microseconds = 0;  // of that kernel
};

// Fraction of a k-tile's time that is proportional to its rows of W.
double share_of_rows(const Traits& traits) { return traits.float_x && traits.packed ? 0.55 : 0.75; }
// Whether the kernel is bound by reading W, so that tiles with fewer rows are faster. Compute-bound kernels do not
// gain: a warpgroup computes 64 rows even if fewer exist. Nor do several token tiles, which read W from L2.
bool waits_for_bytes(const Problem& problem, const Traits& traits, int tokens) {
  return !traits.float_x && !traits.packed && tokens <= (traits.folds ? 64 : 128) && problem.m <= tokens;
}

// k-tiles that take as long as a ping-pong epilogue.
constexpr int64_t kEpilogueKTiles = 12;

constexpr double kGateKernel = 2.5;  // microseconds that SiLU(gate) * up takes as a kernel

constexpr int64_t kMaxSlices = 16;

// Whether the kernels can leave sums of slices of K to a second kernel.
bool may_slice(const Problem& problem, const Traits& traits) {
  return traits.float_x && traits.packed && !traits.folds && !problem.batch_invariant;
}
// What the second kernel takes, fitted to sweeps on an H200: its launch, each slice, and the sums through the L2. It
// starts later where the GEMM kernel leaves no SM to it.
double add_slices_microseconds(const Problem& problem, const Gpu& gpu, int slices, int64_t ctas) {
  constexpr double kStart = 1.5, kFull = 1.5, kSlice = 0.2, kBytesPerMicrosecond = 4e6;
  const double bytes = 8.0 * static_cast<double>(slices * problem.m * problem.n);
  return kStart + (10 * ctas > 9 * gpu.num_sms ? kFull : 0.0) + kSlice * slices + bytes / kBytesPerMicrosecond;
}

// Row tiles of several weights. Gated, a tile has equally many rows of both.
int64_t row_blocks(std::span<const int64_t> rows, int tile_rows, bool gated) {
  if (gated) return ceil_div(rows[0], tile_rows / 2);
  int64_t blocks = 0;
  for (const int64_t n : rows) blocks += ceil_div(n, tile_rows);
  return blocks;
}

// Calls visit for every tile, cluster and split of K that serves the problem: with the tile's full rows of W and, if
// that may save time, with the fewest rows that need no more waves.
template <typename Visit>
void for_each_choice(const Problem& problem, const Gpu& gpu, const Visit& visit) {
  for (int row = 0; row < static_cast<int>(std::size(kTiles)); ++row) {
    const Tile tile = kTiles[row];
    const int tokens = tile.tokens;
    const Traits traits = traits_of(problem, tile);
    if (!traits.serves(tile) || (problem.batch_invariant && !keep_order(problem, traits))) continue;
    if (tile.one_group() && problem.groups() > 1 && problem.group_size < traits.tile_k(tile)) continue;
    // Exact sums of int8 products over longer groups need the accumulators that tall tiles have no registers for.
    const bool exact = tile.tall() && traits.packed && problem.x == Format::kInt8;
    if (exact && (problem.groups() == 1 || problem.group_size > traits.tile_k(tile))) continue;
    const int64_t steps = ceil_div(problem.k, traits.tile_k(tile)) * (is_split(problem) ? kFloat32Parts : 1);
    const int64_t token_blocks = ceil_div(problem.m, tokens);
    if (tile.ping_pong) {  // ping-pong hides all epilogues but the last
      const int64_t clusters = gpu.num_sms / kPingPongCluster;
      const int64_t tiles = ceil_div(ceil_div(problem.n, tile.rows), kPingPongCluster) * token_blocks;
      const double turn = std::max(static_cast<double>(steps), static_cast<double>(steps + kEpilogueKTiles) / 2);
      const Terms counts = {turn * static_cast<double>(ceil_div(tiles, clusters)), 1, 0, 0};
      visit(Choice{row, 1, tile.rows, std::min(tiles, clusters) * kPingPongCluster, false, counts});
      continue;
    }
    // Partial sums of split-K are not batch-invariant.
    const int64_t most_parts = problem.batch_invariant ? 1 : std::min<int64_t>(kMaxCluster, steps);
    for (int split = 1; split <= most_parts; ++split) {
      const int64_t slots = slots_of(gpu, split);
      const auto ctas_of = [&](int tile_rows) { return ceil_div(problem.n, tile_rows) * token_blocks * split; };
      const int64_t waves = ceil_div(ctas_of(tile.rows), slots);
      if (split > 1 && waves > 1) continue;  // split-K CTAs are not persistent
      const auto visit_rows = [&](int tile_rows) {
        const double k_tiles = static_cast<double>(waves * ceil_div(steps, split)) *
                               (1 - share_of_rows(traits) * (1 - 1.0 * tile_rows / tile.rows));
        const double parts = split > 1 ? split : 0;
        const Terms counts = {k_tiles, static_cast<double>(waves), split > 1 ? 1.0 : 0.0, parts};
        visit(Choice{row, split, tile_rows, ctas_of(tile_rows), false, counts});
      };
      visit_rows(tile.rows);
      // Pairs of CTAs split K of the tiles of the last partial wave.
      const int64_t pairs = slots / kLastSplit, full = waves - 1, left = ctas_of(tile.rows) - full * pairs * kLastSplit;
      if (!problem.batch_invariant && split == 1 && full > 0 && left <= pairs && steps >= kLastSplit) {
        const auto k_tiles = static_cast<double>(full * steps + ceil_div(steps, kLastSplit));
        const Terms counts = {k_tiles, static_cast<double>(waves), 1, kLastSplit};
        visit(Choice{row, split, tile.rows, pairs * kLastSplit, true, counts});
      }
      // A second kernel adds slices of K, which unlike CTAs of a cluster may run on any SM: on nine tenths, or all.
      const int64_t tiles = split == 1 && may_slice(problem, traits) ? ctas_of(tile.rows) : gpu.num_sms;
      for (int64_t sms = 9 * gpu.num_sms / 10, before = 1; 2 * tiles <= sms; sms = gpu.num_sms) {
        const int64_t slices = std::min({sms / tiles, kMaxSlices, steps});
        if (slices <= before) break;
        before = slices;
        Choice choice{row, 1, tile.rows, tiles * slices, false};
        choice.counts = {static_cast<double>(ceil_div(steps, slices)), 1, 0, 0};
        choice.slices = static_cast<int>(slices);
        choice.microseconds = add_slices_microseconds(problem, gpu, choice.slices, choice.ctas);
        visit(choice);
      }
      // With fewer rows, a warpgroup of a tall tile would idle. Warpgroups of swap-AB tiles may share all rows.
      if (tile.tall() || (traits.swapped && tokens == tile.rows)) continue;
      const int64_t row_blocks = waves * slots / (token_blocks * split);
      const int64_t fewest = ceil_div(ceil_div(problem.n, row_blocks), int4::kTileN) * int4::kTileN;
      if (fewest <= kWarpgroupRows) {
        visit_rows(kWarpgroupRows);
      } else if (fewest < tile.rows && waits_for_bytes(problem, traits, tokens)) {
        visit_rows(static_cast<int>(fewest));
      }
    }
  }
}

void fill(const Problem& problem, const Gpu& gpu, const Choice& choice, Plan* plan) {
  const Tile tile = kTiles[choice.row];
  const Stage stage(traits_of(problem, tile), tile);
  plan->family = Family::kSm90Ws;
  plan->reason = problem.batch_invariant       ? "batch-invariant on Hopper: wgmma walks K in one order"
                 : tile.ping_pong              ? "many tokens on Hopper: wgmma ping-pong"
                 : shares_long_k(problem, gpu) ? "few rows of W and a long K on Hopper: CTAs of wgmma share K"
                                               : "many tokens on Hopper: wgmma";
  plan->instruction = instruction_of(problem);
  plan->config = choice.row;
  plan->tile_n = choice.tile_rows;
  plan->tile_m = tile.tokens;
  plan->warps = tile.warpgroups() * 4 + kProducerThreads / 32;
  plan->stages = stage.count;
  plan->shared_bytes = stage.total;
  plan->split_k = choice.split;
  plan->splits_last = choice.splits_last;
  plan->partials = choice.slices > 1 ? choice.slices : 0;
  plan->ctas = choice.split > 1 ? choice.ctas : std::min<int64_t>(choice.ctas, gpu.num_sms);
  if (problem.quantizes_x) {
    plan->quantizer = problem.batch_invariant       ? "batch-invariant"
                      : problem.x_rotation != 0     ? "x is rotated"
                      : shares_long_k(problem, gpu) ? "CTAs share K"
                                                    : "more than a few tokens";
  }
}

}  // namespace

const char* unfit(const Problem& problem) {
  if (!has_kernels(problem)) return "wgmma has no kernel for these formats";
  if (!problem.x_aligned && !problem.quantizes_x && !is_split(problem)) return "TMA needs x aligned to 16 bytes";
  if (!is_packed(problem.weight) && !problem.weight_aligned) {
    return "TMA needs rows of W aligned to 16 bytes";
  }
  if (problem.x == Format::kInt8 && problem.k > kMaxIntegerK) return "int32 sums over all of K could overflow";
  return nullptr;
}

bool supports(const Problem& problem, const Gpu& gpu) { return is_hopper(gpu) && has_kernels(problem); }

const char* against(const Problem& problem, const Gpu& gpu) {
  if (!problem.batch_invariant && problem.m <= largest_mma_sync_m(problem, gpu))
    return "few tokens: mma.sync with K split over warps";
  return unfit(problem);
}

namespace {

struct Best {
  Choice choice;
  double microseconds = std::numeric_limits<double>::infinity();
};
// The choice of least expected time among those that serves() accepts and may change.
template <typename Serves>
Best best_choice(const Problem& problem, const Gpu& gpu, const Serves& serves) {
  const double bytes = static_cast<double>(problem.n * problem.k) * (is_packed(problem.weight) ? 0.5 : 1);
  Best best;
  int row = -1;
  const Cost* cost = nullptr;
  for_each_choice(problem, gpu, [&](Choice choice) {
    if (choice.row != row) cost = cost_of(problem, kTiles[row = choice.row]);
    if (cost == nullptr || !serves(choice)) return;
    const double time = microseconds(choice.counts, cost->costs, bytes, kMemory) + choice.microseconds;
    if (time < best.microseconds) best = {choice, time};
  });
  return best;
}
Best best_choice(const Problem& problem, const Gpu& gpu) {
  return best_choice(problem, gpu, [](Choice&) { return true; });
}

}  // namespace

bool plan(const Problem& problem, const Gpu& gpu, Plan* plan) {
  if (against(problem, gpu) != nullptr) return false;
  fill(problem, gpu, best_choice(problem, gpu).choice, plan);
  return true;
}

bool plan_merged(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan) {
  if (!is_hopper(gpu) || !is_float_int4(problem) || problem.x_dtype != DType::kBFloat16) return false;
  if (problem.normed || problem.batch_invariant) return false;
  if (rows.size() < 2 || rows.size() > kMaxParts || std::ranges::min(rows) < 1) return false;
  double separate = problem.gated ? kGateKernel : 0;  // microseconds
  for (const int64_t n : rows) {
    Problem one = problem;
    one.n = n;
    one.gated = false;
    if (against(one, gpu) != nullptr) return false;
    separate += best_choice(one, gpu).microseconds;
  }
  const Best best = best_choice(problem, gpu, [&](Choice& choice) {
    const Tile tile = kTiles[choice.row];
    if (!merges_in(tile, problem.gated) || choice.splits_last || choice.slices > 1) return false;
    if (problem.gated && (choice.split > 1 || choice.tile_rows < tile.rows)) return false;
    // A weight's last row block may be partial, so there may be more than those of one weight of all rows.
    const int64_t per_block = ceil_div(problem.m, tile.tokens) * choice.split, slots = slots_of(gpu, choice.split);
    const int64_t waves = ceil_div(ceil_div(problem.n, choice.tile_rows) * per_block, slots);
    choice.ctas = row_blocks(rows, choice.tile_rows, problem.gated) * per_block;
    return ceil_div(choice.ctas, slots) == waves;
  });
  if (best.microseconds >= separate) return false;
  fill(problem, gpu, best.choice, plan);
  plan->reason = "several weights in one kernel on Hopper: wgmma";
  return true;
}

void add_candidates(const Problem& problem, const Gpu& gpu, std::vector<Candidate<Plan>>* all) {
  if (unfit(problem) != nullptr) return;
  for_each_choice(problem, gpu, [&](const Choice& choice) {
    Candidate<Plan>& candidate = all->emplace_back();
    fill(problem, gpu, choice, &candidate.plan);
    if (choice.slices > 1) return;  // the time of the second kernel is no term of the costs
    if (const Cost* cost = cost_of(problem, kTiles[choice.row])) candidate.operands = cost->name;
    candidate.counts = choice.counts;
  });
}

}  // namespace qao::gemm::sm90_ws
