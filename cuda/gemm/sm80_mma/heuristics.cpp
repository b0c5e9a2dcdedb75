// Heuristics of the mma.sync kernels with 8-bit x or W: tile, split of K and partition over CTAs.
#include "gemm/sm80_mma/heuristics.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/operands.h"
#include "gemm/sm80_mma/params.h"
#include "gemm/sm80_mma/quantized_x.h"
#include "gemm/sm80_mma/tile.h"
#include "gemm/sm90_ws/heuristics.h"

namespace qao::gemm::sm80_mma {
namespace {

// A row of tiles_sm90.inc or tiles.inc.
struct Config {
  int index;  // its row; rows of tiles.inc follow those of tiles_sm90.inc
  int64_t max_m;
  ShareKind share;
  XKind x;
  WeightKind weight;
  bool scales_x;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm, token_sum_bytes;
  std::array<int, static_cast<size_t>(Operands::kCount)> ring;  // ring bytes, by operand formats

  int ring_bytes(const Problem& problem) const { return ring[static_cast<size_t>(operands_of(problem))]; }
};

struct Choice {
  const Config* config = nullptr;
  int64_t ctas = 0;  // per split of K
  bool runs = false;
  int64_t shared_bytes = 0;
  int sums_at = 0, sum_places = 1;
  int split_k = 1;
};

template <typename Tile>
constexpr Config config_of(int index, int64_t max_m, ShareKind share, XKind x, WeightKind weight) {
  // With a ResidentX the ring holds W only.
  const auto ring = [&](int x_bytes, Format format) {
    return Tile::ring_bytes({x == XKind::kQuantizes && x_bytes == 1 ? 0 : x_bytes, format});
  };
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
          {
#define QAO_OPERANDS(name, x_type, weight_type, x_bytes, x, weight, ...) ring(x_bytes, Format::weight),
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
          }};
}

constexpr int64_t kAnyM = INT64_MAX;
constexpr int kFirst = __COUNTER__ + 1;  // a row's index is its position in the list; __COUNTER__ may start anywhere
constexpr Config kConfigs[] = {
#define QAO_TILE(max_m, share, x, weight, ...) \
  config_of<Tile<__VA_ARGS__>>(__COUNTER__ - kFirst, max_m, share, x, weight),
#include "gemm/sm80_mma/tiles_sm90.inc"  // kTilesSm90 rows
//
#include "gemm/sm80_mma/tiles.inc"
#undef QAO_TILE
};

std::span<const Config> configs_of(const Gpu& gpu) {
  const std::span<const Config> all(kConfigs);
  return is_hopper(gpu) ? all.first(kTilesSm90) : all.subspan(kTilesSm90);
}

constexpr int64_t kManyTokens = 64;  // above, the GEMM is compute-bound

// Split-K factor: enough for one CTA on every SM, or config.ctas_per_sm with many tokens, and at least as many as keep
// int32 sums from overflowing.
int choose_split(const Config& config, const Problem& problem, int64_t tiles, int64_t k_steps, int num_sms) {
  int64_t least = 1;
  if (problem.x == Format::kInt8 && problem.weight == Format::kInt8) {
    least = ceil_div(k_steps, config.warps_k * (kInt32Columns / kTileK));
  }
  if (problem.batch_invariant) return static_cast<int>(least);
  const int64_t room = num_sms * (problem.m > kManyTokens ? config.ctas_per_sm : 1);
  return std::max(static_cast<int>(least),
                  split_of(tiles, room, k_steps, static_cast<int64_t>(config.warps_k) * config.stages));
}

// Shared memory per CTA that lets config.ctas_per_sm CTAs share an SM. An SM has 1 KB more than the limit of a CTA, and
// each CTA uses 1 KB more than it requests.
int64_t shared_room(const Config& config, const Problem& problem, const Gpu& gpu) {
  const int all = gpu.shared_bytes_per_cta + 1024, ctas = all / (config.ring_bytes(problem) + 1024);
  return ctas == 0 ? 0 : all / std::min(ctas, config.ctas_per_sm) - 1024;
}

// Lays out shared memory: the ring, the partial sums, a resident x. Returns false if a CTA needs too much.
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

constexpr int64_t kMaxQuantizedK = 1 << 18;  // more does not fit any GPU
constexpr int kMaxUnsplit = 2;               // largest split-K factor given up to fuse the quantization of x

// Elements of x that a CTA can quantize in the time of a separate kernel. int4 weights need group sums too.
int64_t most_floats(const Config& config, Format weight) {
  return config.warps * (weight == Format::kInt4 ? 1792 : config.warps == 8 ? 3072 : 2048);
}

// Whether a row of the tile list supports CTAs with runs of `run` n-tiles, or with output tiles.
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

// Cost of a run on one SM, in units of half an n-tile: all n-tile slots of its passes, including empty ones, and a
// fixed cost per pass of half an n-tile (8-bit W) or one n-tile (4-bit W).
int64_t run_cost(const Config& config, Format weight, int64_t run) {
  const int64_t places = config.tile_n / kTileN;
  return config.ctas_per_sm * ceil_div(run, places) * (2 * places + (weight == Format::kInt4 ? 2 : 1));
}

// Chooses the row for this problem and GPU. `config` is null if no row fits: the quantization of x cannot be fused, or
// the GPU has too little shared memory.
Choice choose(const Problem& problem, const Gpu& gpu, bool quantizes) {
  const int64_t m = std::max<int64_t>(problem.m, 1);
  const int64_t k_steps = ceil_div(problem.k, kTileK) * (is_split(problem) ? kFloat32Parts : 1);
  Choice best;
  int64_t best_cost = 0;
  for (const Config& config : configs_of(gpu)) {
    if (best.config != nullptr && (config.share != ShareKind::kRun || config.max_m != best.config->max_m)) continue;
    if (problem.batch_invariant && config.max_m != kAnyM) continue;  // tiles differ in summation order
    if (m > config.max_m || quantizes != (config.x == XKind::kQuantizes) || !serves(config.weight, problem.weight))
      continue;
    if (!quantizes && !serves(config.x, problem.x == Format::kFloat)) continue;
    // If a CTA has all tokens, CTAs divide the n-tiles of W evenly, shared memory permitting. Otherwise each computes
    // an output tile.
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
        // A warp quantizes a token over all of K. With split-K a CTA would not see the whole range.
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

// ---- The plan of a choice ----

constexpr int64_t kLeastPrefetch = 16384, kMostPrefetch = 32768;  // bytes of W per CTA

// Bytes of W that a CTA prefetches into L2 before the PDL wait: an eighth of its share, 16 to 32 KB. Zero for int4 if
// the kernel quantizes x: the prefetch would delay x.
int prefetch_bytes(const Problem& problem, const Choice& choice, bool quantizes) {
  const bool packed = problem.weight == Format::kInt4;
  const bool possible = choice.runs && choice.split_k == 1 && (packed || problem.weight_aligned);
  if (!possible || (packed && quantizes)) return 0;
  const int64_t eighth = weight_bytes(problem) / choice.ctas / 8;
  return static_cast<int>(std::clamp(eighth / 1024 * 1024, kLeastPrefetch, kMostPrefetch));
}

// Whether the next kernel may start once all CTAs of this one run. Not if SMs have room for one more CTA: CTAs of the
// next kernel would then be spread unevenly over the SMs for as long as it runs.
bool lets_next_early(const Config& config, const Choice& choice, const Gpu& gpu) {
  return config.ctas_per_sm == 1 ||
         (config.ctas_per_sm + 1) * (choice.shared_bytes + 1024) > gpu.shared_bytes_per_cta + 1024;
}

// Why the kernel cannot quantize this x; null if it can, unless x is too large (choose()).
const char* against_quantizing(const Problem& problem) {
  if (problem.batch_invariant) return "batch-invariant";
  if (problem.m > ResidentX::kMaxTokens) return "more than a few tokens";
  if (problem.x_rotation != 0) return "x is rotated";
  if (!problem.x_aligned) return "rows of x are not aligned to 16 bytes";
  if (problem.x_scaling == Scaling::kTensor && !problem.static_scale && problem.m > 1) return "tokens share a scale";
  return nullptr;
}

const char* instruction_of(const Problem& problem, const Config& config, bool fp8_mma) {
  if (problem.x == Format::kInt8) return "mma.sync s8";
  if (problem.x == Format::kFp8) return fp8_mma ? "mma.sync e4m3" : "mma.sync f16";
  const bool float16 = problem.x_dtype == DType::kFloat16 || (problem.weight == Format::kFp8 && config.scales_x);
  return float16 ? "mma.sync f16" : "mma.sync bf16";
}

// Fills in the plan. Returns false if no tile fits.
bool fill(const Problem& problem, const Gpu& gpu, Family family, Plan* plan) {
  Choice choice;
  if (problem.quantizes_x) {
    const char* against = against_quantizing(problem);
    if (against == nullptr) choice = choose(problem, gpu, true);
    plan->quantizes_x = choice.config != nullptr;
    plan->quantizer = against != nullptr  ? against
                      : plan->quantizes_x ? "few tokens: every CTA quantizes x"
                                          : "x is too large for every CTA to quantize, or K is split";
  }
  if (choice.config == nullptr) choice = choose(problem, gpu, false);
  const Config* config = choice.config;
  if (config == nullptr) return false;
  const bool fp8_mma = family == Family::kSm89Mma;
  const char* against_wgmma = is_hopper(gpu) ? sm90_ws::against(problem, gpu) : nullptr;
  plan->family = family;
  plan->reason = against_wgmma != nullptr ? against_wgmma
                 : fp8_mma                ? "mma.sync on fp8 tensor cores"
                                          : "mma.sync serves every GPU from sm_80";
  plan->instruction = instruction_of(problem, *config, fp8_mma);
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
  plan->partials = plan->split_k > 1 ? plan->split_k : 0;
  return true;
}

}  // namespace

bool quantizes(const Problem& problem, const Gpu& gpu) {
  return problem.quantizes_x && against_quantizing(problem) == nullptr && choose(problem, gpu, true).config != nullptr;
}

bool supports(const Problem& problem, const Gpu&) { return operands_of(problem) != Operands::kCount; }
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan) { return fill(problem, gpu, Family::kSm80Mma, plan); }

bool supports_sm90(const Problem& problem, const Gpu& gpu) { return is_hopper(gpu) && supports(problem, gpu); }
bool plan_sm90(const Problem& problem, const Gpu& gpu, Plan* plan) {
  return fill(problem, gpu, Family::kSm90Mma, plan);
}

bool supports_sm89(const Problem& problem, const Gpu& gpu) {
  return problem.x == Format::kFp8 && supports(problem, gpu) && has_fp8_mma(gpu);
}
bool plan_sm89(const Problem& problem, const Gpu& gpu, Plan* plan) {
  Gpu compiled_for = gpu;
  compiled_for.shared_bytes_per_cta = std::min(gpu.shared_bytes_per_cta, kFp8SharedBytes);
  return fill(problem, compiled_for, Family::kSm89Mma, plan);
}

}  // namespace qao::gemm::sm80_mma
