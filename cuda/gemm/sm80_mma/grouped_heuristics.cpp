// Heuristics of portable grouped GEMMs.
// Tile and number of CTAs depend only on the numbers of rows and experts.
#include <algorithm>
#include <array>
#include <span>
#include <string>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/moe_routing.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/grouped.h"
#include "gemm/sm80_mma/heuristics.h"
#include "gemm/sm80_mma/operands.h"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {
namespace {

struct Config {
  int64_t most_rows;  // average per expert
  XKind x;
  bool runs;
  int tile_n, tile_m, warps, stages, ctas_per_sm, sum_bytes;
  std::array<int, static_cast<size_t>(Operands::kCount) + 1> ring;  // ring bytes, by operand formats; 4-bit W, float x
};

template <typename Tile>
constexpr Config config_of(int64_t most_rows, XKind x, bool runs) {
  return {most_rows,
          x,
          runs,
          Tile::kN,
          Tile::kM,
          Tile::kThreads / 32,
          Tile::kStages,
          Tile::kCtasPerSm,
          Tile::kTokenSumBytes * Tile::kM,
          {
#define QAO_OPERANDS(name, x_type, weight_type, x_bytes, x, weight, ...) Tile::ring_bytes({x_bytes, Format::weight}),
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
              Tile::ring_bytes({2, Format::kInt4}),
          }};
}

constexpr int64_t kAnyM = INT64_MAX;
constexpr Config kConfigs[] = {
#define QAO_TILE(most_rows, x, runs, ...) config_of<Tile<__VA_ARGS__>>(most_rows, x, runs),
#include "gemm/sm80_mma/grouped_tiles_sm90.inc"  // kGroupedTilesSm90 rows
//
#include "gemm/sm80_mma/grouped_tiles.inc"
#undef QAO_TILE
};
std::span<const Config> configs_of(const Gpu& gpu) {
  const std::span<const Config> all(kConfigs);
  return is_hopper(gpu) ? all.first(grouped::kGroupedTilesSm90) : all.subspan(grouped::kGroupedTilesSm90);
}

constexpr Config kWeightOnlyConfigs[] = {
#define QAO_TILE(most_rows, ...) config_of<Tile<__VA_ARGS__>>(most_rows, XKind::kSixteenBits, false),
#include "gemm/sm80_mma/grouped_weight_only_tiles.inc"
#undef QAO_TILE
};

constexpr int64_t kWaves = 3;  // waves of CTAs with runs, since their times differ

int64_t rows_of_expert(int64_t experts, int64_t rows) {
  return ceil_div(rows, std::max<int64_t>(1, std::min(experts, rows)));
}

void fill(const Config& config, int64_t experts, int64_t rows, int64_t row_tiles, const Gpu& gpu, bool runs,
          Plan* plan) {
  plan->reason = "grouped: rows of each expert, found on the GPU";
  plan->tile_n = config.tile_n;
  plan->tile_m = config.tile_m;
  plan->warps = config.warps;
  plan->stages = config.stages;
  plan->runs = runs;
  const int64_t tiles = token_tiles(experts, rows, config.tile_m), pass = config.tile_n / int4::kTileN;
  int64_t row_blocks = ceil_div(row_tiles, pass);
  if (runs) {
    // Enough CTAs for a few waves, each with whole passes.
    const int64_t wanted = ceil_div(kWaves * gpu.num_sms * config.ctas_per_sm, std::max<int64_t>(tiles, 1));
    const int64_t passes = ceil_div(row_blocks, std::min(wanted, row_blocks));
    row_blocks = ceil_div(row_tiles, passes * pass);
  }
  plan->ctas = tiles * row_blocks;
}

const char* instruction_of(const Problem& problem) {
  if (problem.x == Format::kInt8) return "mma.sync s8";
  if (problem.x == Format::kFp8) return "mma.sync f16";
  if (!is_packed(problem.weight)) return "mma.sync";
  return problem.x_dtype == DType::kFloat16 ? "mma.sync f16" : "mma.sync bf16";
}

}  // namespace

Status no_tile(const Gpu& gpu) {
  return Status::error("no kernel fits the GPU's " + std::to_string(gpu.shared_bytes_per_cta) +
                       " bytes of shared memory");
}

bool supports_grouped(const Problem& problem) {
  return is_float_int4(problem) || is_float_fp4(problem) || operands_of(problem) != Operands::kCount;
}

Status plan_grouped(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  const bool weight_only = is_float_int4(problem) || is_float_fp4(problem);
  const std::span<const Config> configs = weight_only ? std::span(kWeightOnlyConfigs) : configs_of(gpu);
  for (const Config& config : configs) {
    plan->config = static_cast<int>(&config - (weight_only ? kWeightOnlyConfigs : kConfigs));
    if (problem.batch_invariant && config.most_rows != kAnyM) continue;  // tiles differ in summation order
    if (rows_of_expert(experts.count, experts.rows) > config.most_rows) continue;
    if (!serves(config.x, problem.x == Format::kFloat)) continue;
    plan->family = weight_only ? Family::kSm80MmaWeightOnly : is_hopper(gpu) ? Family::kSm90Mma : Family::kSm80Mma;
    plan->instruction = instruction_of(problem);
    const int ring = config.ring[static_cast<size_t>(operands_of(problem))], table = table_bytes(config.tile_m);
    // In a run, the next pass is fetched while the partial sums of the previous one are read.
    const bool runs = config.runs && ring + config.sum_bytes + table <= gpu.shared_bytes_per_cta;
    plan->sums_at = runs ? ring : 0;
    plan->shared_bytes = (runs ? ring + config.sum_bytes : std::max(ring, config.sum_bytes)) + table;
    if (plan->shared_bytes > gpu.shared_bytes_per_cta) continue;
    fill(config, experts.count, experts.rows, int4::tiles_n(problem.n), gpu, runs, plan);
    if (plan->ctas > INT32_MAX) {
      return Status::error("so many rows of experts do not fit one launch", "Pass fewer at a time");
    }
    return {};
  }
  return no_tile(gpu);
}

}  // namespace qao::gemm::sm80_mma
