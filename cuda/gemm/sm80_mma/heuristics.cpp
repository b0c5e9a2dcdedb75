// Planning of the portable kernels.
#include "gemm/sm80_mma/heuristics.h"

#include <algorithm>

#include "common/integers.h"
#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/tile_choice.h"
#include "gemm/sm90_ws/heuristics.h"

namespace qao::gemm::sm80_mma {
namespace {

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
  plan->workspace_bytes = workspace_of(problem, *plan).bytes;
  return true;
}

}  // namespace

bool quantizes(const Problem& problem, const Gpu& gpu) {
  return problem.quantizes_x && against_quantizing(problem) == nullptr && choose(problem, gpu, true).config != nullptr;
}

bool supports(const Problem& problem, const Gpu&) { return operands_of(problem) != Operands::kCount; }
bool plan(const Problem& problem, const Gpu& gpu, Plan* plan) { return fill(problem, gpu, Family::kSm80Mma, plan); }

bool supports_fp8(const Problem& problem, const Gpu& gpu) {
  return problem.x == Format::kFp8 && supports(problem, gpu) && has_fp8_mma(gpu);
}
bool plan_fp8(const Problem& problem, const Gpu& gpu, Plan* plan) {
  Gpu compiled_for = gpu;
  compiled_for.shared_bytes_per_cta = std::min(gpu.shared_bytes_per_cta, kFp8SharedBytes);
  return fill(problem, compiled_for, Family::kSm89Mma, plan);
}

}  // namespace qao::gemm::sm80_mma
