// Kernel selection. Pure host code that depends on the problem and the properties of the GPU only.
#include <algorithm>
#include <span>

#include "gemm/arch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/heuristics.h"
#include "gemm/sm90_skinny/heuristics.h"
#include "gemm/sm90_ws/heuristics.h"
#include "qao/gemm.h"

namespace qao::gemm {
namespace {

struct Row {
  // Whether the family has a kernel for these formats on this GPU.
  bool (*supports)(const Problem& problem, const Gpu& gpu);
  // Fills in the plan. Returns false if another family is faster or no tile fits.
  bool (*plan)(const Problem& problem, const Gpu& gpu, Plan* plan);
};

// In order of preference: the first row that supports and plans a problem runs it. Only the first row fuses RMSNorm.
constexpr Row kFamilies[] = {
    {sm90_skinny::supports, sm90_skinny::plan_smem_x},
    {sm90_skinny::supports, sm90_skinny::plan_tma_x},
    {sm90_skinny::supports, sm90_skinny::plan_ring_x},
    {sm90_ws::supports, sm90_ws::plan},
    {sm80_mma::supports_fp8, sm80_mma::plan_fp8},
    {sm80_mma::supports, sm80_mma::plan},
    {sm80_mma::weight_only::supports, sm80_mma::weight_only::plan},
};
constexpr std::span kPortable = std::span(kFamilies).last(3);

}  // namespace

bool fuses_norm(const Problem& problem, const Gpu& gpu) {
  Plan plan;
  return kFamilies[0].supports(problem, gpu) && kFamilies[0].plan(problem, gpu, &plan);
}

bool merges(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan) {
  return is_supported(gpu) && sm90_skinny::plan_merged(problem, rows, gpu, plan);
}

Status plan(const Problem& given, const Gpu& gpu, Plan* plan) {
  Problem problem = given;
  if (has_whole_sums(problem)) problem.batch_invariant = false;  // every plan is batch-invariant
  if (!is_supported(gpu)) {
    return Status::error("GPUs of compute capability " + std::to_string(gpu.compute_capability / 10) + "." +
                             std::to_string(gpu.compute_capability % 10) + " are not supported; 8.0 is the lowest",
                         "Run on a newer GPU, or on the CPU");
  }
  const bool fused = problem.normed || problem.gated;
  bool supported = false;
  for (const Row& row : kFamilies) {
    *plan = Plan{};
    const bool supports = row.supports(problem, gpu);
    supported |= supports;
    if (supports && row.plan(problem, gpu, plan)) return {};
    if (fused) return Status::error("no kernel makes RMSNorm and this product at once", "Ask fuses_norm() first");
  }
  if (!supported) {
    return Status::error(
        std::string("no CUDA kernel multiplies x in ") + name_of(problem.x) + " by W in " + name_of(problem.weight),
        "Move the layer to the CPU, or quantize it to another scheme");
  }
  return Status::error("no kernel fits the GPU's " + std::to_string(gpu.shared_bytes_per_cta) +
                       " bytes of shared memory");
}

std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu) {
  std::vector<Candidate<Plan>> all;
  sm90_skinny::add_candidates(problem, gpu, &all);
  Candidate<Plan> portable;
  const auto plans = [&](const Row& row) {
    portable.plan = {};
    return row.supports(problem, gpu) && row.plan(problem, gpu, &portable.plan);
  };
  if (std::ranges::any_of(kPortable, plans)) all.push_back(portable);
  if (sm90_ws::supports(problem, gpu)) sm90_ws::add_candidates(problem, gpu, &all);
  return all;
}

std::string to_string(const Plan& plan) {
  using std::to_string;
  return std::string(name_of(plan.family)) + " (" + plan.instruction + ") tile " + to_string(plan.tile_n) + "x" +
         to_string(plan.tile_m) + " warps " + to_string(plan.warps) + " stages " + to_string(plan.stages) +
         " split_k " + to_string(plan.split_k) + (plan.splits_last ? " splits_last" : "") + " ctas " +
         to_string(plan.ctas) + " shared " + to_string(plan.shared_bytes) + " workspace " +
         to_string(plan.workspace_bytes) + " (" + plan.reason + ")" +
         (plan.quantizer[0] == '\0'
              ? ""
              : std::string(" quantizes_x ") + (plan.quantizes_x ? "yes (" : "no (") + plan.quantizer + ")");
}

}  // namespace qao::gemm
