// Kernel selection. Pure host code that depends on the problem and the properties of the GPU only.
#include "mm/mma_sync/plan.h"

#include <algorithm>
#include <span>

#include "mm/gpu.h"
#include "mm/problem.h"
#include "mm/stream/plan.h"
#include "mm/wgmma/plan.h"
#include "qao/mm.h"

namespace qao::mm {
namespace {

struct Row {
  // Whether the family has a kernel for these formats on this GPU.
  bool (*supports)(const Problem& problem, const Gpu& gpu);
  // Fills in the plan. Returns false if another family is faster or no tile fits.
  bool (*plan)(const Problem& problem, const Gpu& gpu, Plan* plan);
};

// In order of preference: the first row that supports and plans a problem runs it. Only the first row fuses RMSNorm.
constexpr Row kBodies[] = {
    {stream::supports, stream::plan_resident},
    {stream::supports, stream::plan_tma},
    {stream::supports, stream::plan_ring},
    {wgmma::supports, wgmma::plan},
    {mma_sync::supports_fp8, mma_sync::plan_fp8},
    {mma_sync::supports, mma_sync::plan},
    {mma_sync::float_int4::supports, mma_sync::float_int4::plan},
};
constexpr std::span kPortable = std::span(kBodies).last(3);

}  // namespace

bool fuses_norm(const Problem& problem, const Gpu& gpu) {
  Plan plan;
  return kBodies[0].supports(problem, gpu) && kBodies[0].plan(problem, gpu, &plan);
}

bool merges(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan) {
  return is_supported(gpu) && stream::plan_merged(problem, rows, gpu, plan);
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
  for (const Row& row : kBodies) {
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
  stream::add_candidates(problem, gpu, &all);
  Candidate<Plan> portable;
  const auto plans = [&](const Row& row) {
    portable.plan = {};
    return row.supports(problem, gpu) && row.plan(problem, gpu, &portable.plan);
  };
  if (std::ranges::any_of(kPortable, plans)) all.push_back(portable);
  if (wgmma::supports(problem, gpu)) wgmma::add_candidates(problem, gpu, &all);
  return all;
}

std::string to_string(const Plan& plan) {
  using std::to_string;
  return std::string(name_of(plan.body)) + " (" + plan.instruction + ") tile " + to_string(plan.tile_n) + "x" +
         to_string(plan.tile_m) + " warps " + to_string(plan.warps) + " stages " + to_string(plan.stages) +
         " split_k " + to_string(plan.split_k) + (plan.splits_last ? " splits_last" : "") + " ctas " +
         to_string(plan.ctas) + " shared " + to_string(plan.shared_bytes) + " workspace " +
         to_string(plan.workspace_bytes) + " (" + plan.reason + ")" +
         (plan.quantizer[0] == '\0'
              ? ""
              : std::string(" quantizes_x ") + (plan.quantizes_x ? "yes (" : "no (") + plan.quantizer + ")");
}

}  // namespace qao::mm
