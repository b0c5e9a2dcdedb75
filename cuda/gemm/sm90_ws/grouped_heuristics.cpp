// Heuristics of grouped GEMMs on Hopper. They depend on the numbers of rows and experts only.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/moe_routing.h"
#include "gemm/sm90_ws/cost_model.h"
#include "gemm/sm90_ws/grouped.h"
#include "gemm/sm90_ws/heuristics.h"

namespace qao::gemm::sm90_ws {
namespace {

// Other kernel families are faster with at most `rows` rows per expert on average, unless there are at least `tiles`
// single-row tiles per SM.
struct Few {
  int64_t rows, tiles;
};
Few few(const Problem& problem) {
  const bool short_groups = is_packed(problem.weight) && problem.group_size < 64;
  if (problem.x == Format::kFloat) {
    if (is_packed(problem.weight) || is_split(problem)) return {is_float_fp4(problem) ? 3 : 6, INT64_MAX};
    return problem.weight == Format::kFp8 ? Few{1, 2} : Few{2, INT64_MAX};
  }
  if (!is_packed(problem.weight)) return {0, 0};
  return problem.x == Format::kFp8 && short_groups ? Few{7, INT64_MAX} : Few{1, 5};
}
constexpr int64_t kPingPongRows = 64;  // average rows per expert: ping-pong tiles have 128 tokens

// Expected tiles per expert, if rows vary around the average as for random token choices, plus a quarter. A tile exists
// for each multiple of `tokens` below the row count. With many tiles, the last one is half full on average.
double expected_tiles(double rows, int tokens) {
  constexpr double kMany = 32;
  if (rows > kMany * tokens) return rows / tokens + 0.5;
  const double deviation = std::sqrt(rows + rows * rows / 16);
  double tiles = 0, chance;
  double below = 0.5;
  do {
    chance = 0.5 * std::erfc((below - rows) / (deviation * std::sqrt(2.0)));
    tiles += chance;
    below += tokens;
  } while (chance > 1e-3);
  return tiles;
}

}  // namespace

bool plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  Problem gathered = problem;
  gathered.x_aligned = true;
  if (!supports(problem, gpu) || unfit(gathered) != nullptr || experts.count > kMaxExperts) return false;
  const int64_t active = std::max<int64_t>(1, std::min(experts.count, experts.rows));
  const int64_t average = ceil_div(experts.rows, active);
  // Leave small problems to other kernel families
  const Few least_here = few(problem);
  const int64_t shares = active * ceil_div(problem.n, 2 * kWarpgroupRows) / gpu.num_sms;
  if (!problem.batch_invariant && average <= least_here.rows && shares < least_here.tiles) return false;
  // Select the tile of least expected time
  const double rows = static_cast<double>(experts.rows) / static_cast<double>(active);
  const double bytes = static_cast<double>(active * weight_bytes(problem));
  const int64_t parts = is_split(problem) ? kFloat32Parts : 1;
  int best = -1;
  double least = 0;
  for (int row = 0; row < static_cast<int>(std::size(kTiles)); ++row) {
    const Tile tile = kTiles[row];
    const Formats& formats = kRows[row_of(problem, tile)];
    const Cost* cost = cost_of(problem, tile);
    if (tile.ping_pong && average < kPingPongRows) continue;
    if (problem.batch_invariant && !keep_order(problem, formats.traits())) continue;
    if (!serves_experts(tile) || !formats.traits().serves(tile) || cost == nullptr) continue;
    const int64_t row_blocks = round_up(ceil_div(problem.n, tile.rows), tile.sharers());
    const double tiles = expected_tiles(rows, tile.tokens) * static_cast<double>(active * row_blocks);
    const double waves = std::max(1.0, tiles / gpu.num_sms);
    const auto steps = static_cast<double>(parts * ceil_div(problem.k, formats.traits().tile_k(tile)));
    // Ping-pong hides all epilogues but the last.
    const double time = microseconds({waves * steps, tile.ping_pong ? 1 : waves, 0, 0}, cost->costs, bytes, kMemory);
    if (best >= 0 && time >= least) continue;
    best = row, least = time;
  }
  if (best < 0) return false;
  // Fill in the plan
  const Tile tile = kTiles[best];
  const Stage stage(traits_of(problem, tile), tile, true);
  plan->family = Family::kSm90Ws;
  plan->reason = "grouped: many rows an expert on Hopper: wgmma";
  plan->instruction = instruction_of(problem);
  plan->config = best;
  plan->tile_n = tile.rows;
  plan->tile_m = tile.tokens;
  plan->warps = tile.warpgroups() * 4 + kProducerThreads / 32;
  plan->stages = stage.count;
  plan->shared_bytes = stage.total;
  const int64_t cluster = tile.sharers();
  const int64_t clusters =
      token_tiles(experts.count, experts.rows, tile.tokens) * ceil_div(problem.n, tile.rows * cluster);
  plan->ctas = std::min<int64_t>(clusters, gpu.num_sms / cluster) * cluster;
  if (gathers(problem, experts)) plan->workspace_bytes = Gathered(problem, experts.rows).bytes;
  return true;
}

}  // namespace qao::gemm::sm90_ws
