// Heuristics of the portable W4A16 kernels.
#include <algorithm>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/heuristics.h"
#include "gemm/sm80_mma/tile.h"
#include "gemm/sm90_ws/heuristics.h"

namespace qao::gemm::sm80_mma::weight_only {
namespace {

struct Config {
  int index;  // its row
  int64_t max_m;
  bool one_wave;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm;
  int64_t shared_bytes;
};

template <typename Tile>
constexpr Config config_of(int index, int64_t max_m, bool one_wave) {
  return {index,
          max_m,
          one_wave,
          Tile::kN,
          Tile::kM,
          Tile::kWarpsK,
          Tile::kThreads / 32,
          Tile::kStages,
          Tile::kCtasPerSm,
          std::max(Tile::ring_bytes({2, Format::kInt4}), Tile::kTokenSumBytes * Tile::kM)};
}

constexpr int64_t kAnyM = INT64_MAX;
constexpr int kFirst = __COUNTER__ + 1;  // a row's index is its position in the list; __COUNTER__ may start anywhere
constexpr Config kConfigs[] = {
#define QAO_TILE(max_m, one_wave, ...) config_of<Tile<__VA_ARGS__>>(__COUNTER__ - kFirst, max_m, one_wave),
#include "gemm/sm80_mma/weight_only_tiles.inc"
#undef QAO_TILE
};

// The first row that fits the problem and the GPU, or null.
const Config* first_fitting(const Problem& problem, const Gpu& gpu) {
  for (const Config& config : kConfigs) {
    if (problem.m > config.max_m) continue;
    if (problem.batch_invariant && config.max_m != kAnyM) continue;  // tiles differ in summation order
    if (config.shared_bytes > gpu.shared_bytes_per_cta) continue;
    if (config.one_wave && ceil_div(problem.n, config.tile_n) > gpu.num_sms * config.ctas_per_sm) continue;
    return &config;
  }
  return nullptr;
}

int64_t output_tiles(const Config& config, const Problem& problem) {
  return ceil_div(problem.n, config.tile_n) * ceil_div(std::max<int64_t>(problem.m, 1), config.tile_m);
}

}  // namespace

bool supports(const Problem& problem, const Gpu&) { return is_float_int4(problem) || is_float_fp4(problem); }

bool plan(const Problem& problem, const Gpu& gpu, Plan* plan) {
  const Config* config = first_fitting(problem, gpu);
  if (config == nullptr) return false;
  const int64_t tiles = output_tiles(*config, problem);
  const int64_t k_steps = int4::tiles_k(problem.k) * (is_split(problem) ? kFloat32Parts : 1);
  plan->family = Family::kSm80MmaWeightOnly;
  const char* against_wgmma = sm90_ws::supports(problem, gpu) ? sm90_ws::against(problem, gpu) : nullptr;
  plan->reason = against_wgmma != nullptr ? against_wgmma : "mma.sync serves every GPU from sm_80";
  plan->instruction = problem.x_dtype == DType::kFloat16 ? "mma.sync f16" : "mma.sync bf16";
  plan->config = config->index;
  plan->tile_n = config->tile_n;
  plan->tile_m = config->tile_m;
  plan->warps = config->warps;
  plan->stages = config->stages;
  plan->split_k =
      problem.batch_invariant ? 1 : split_of(tiles, gpu.num_sms, k_steps, int64_t{config->warps_k} * config->stages);
  plan->ctas = tiles * plan->split_k;
  plan->shared_bytes = config->shared_bytes;
  // A second kernel adds the parts, and applies the fractions of zero points if x is float32.
  plan->partials = plan->split_k > 1 || (is_split(problem) && problem.has_zeros) ? plan->split_k : 0;
  return true;
}

}  // namespace qao::gemm::sm80_mma::weight_only
