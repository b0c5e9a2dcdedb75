// Table of kernel families (qao/families.inc): plan() selects one, launch() runs its kernel.
//
// plan() is pure host code that depends on the problem and the properties of the GPU only. Without QAO_WITH_CUDA there
// are plans, but no launch().
#include <algorithm>
#include <iterator>
#include <span>

#include "gemm/arch.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm80_mma/heuristics.h"
#include "gemm/sm90_skinny/heuristics.h"
#include "gemm/sm90_ws/heuristics.h"
#include "qao/grouped_gemm.h"

namespace qao::gemm {
namespace {

struct KernelFamily {
  // Whether the family has a kernel for these formats on this GPU.
  bool (*supports)(const Problem& problem, const Gpu& gpu);
  // Fills in the plan. Returns false if another family is faster or no tile fits.
  bool (*plan)(const Problem& problem, const Gpu& gpu, Plan* plan);
  LaunchFunction* launch;
  LaunchGroupedFunction* launch_grouped;  // null if there is no grouped kernel
};

constexpr KernelFamily kFamilies[] = {
#if defined(QAO_WITH_CUDA)
#define QAO_FAMILY(id, name, space, supports, plan, launch, launch_grouped) \
  {space::supports, space::plan, space::launch, launch_grouped},
#else
#define QAO_FAMILY(id, name, space, supports, plan, ...) {space::supports, space::plan, nullptr, nullptr},
#endif
#include "qao/families.inc"
#undef QAO_FAMILY
};
constexpr std::span kPortable = std::span(kFamilies).subspan(static_cast<size_t>(Family::kSm90Mma));

// Formats in the names of kernels: w, the bits of W, a, the bits of x as the kernel reads it; fp4 and fp8 by name.
const char* formats_of(const Problem& problem) {
  const auto name = [&](const char* float_x, const char* int8_x, const char* fp8_x) {
    return problem.x == Format::kFloat ? float_x : problem.x == Format::kInt8 ? int8_x : fp8_x;
  };
  switch (problem.weight) {
    case Format::kInt4:
      return name("w4a16", "w4a8", "w4afp8");
    case Format::kInt8:
      return name("w8a16", "w8a8", "");
    case Format::kFp8:
      return name("wfp8a16", "", "wfp8afp8");
    case Format::kFp4:
      return name("wfp4a16", "", "");
    default:
      return "";
  }
}

// Completes the plan that a family made.
void complete(const Problem& problem, Plan* plan) {
  plan->formats = formats_of(problem);
  plan->workspace_bytes = std::max(plan->workspace_bytes, workspace_of(problem, plan->partials).bytes);
}

Status too_old(const Gpu& gpu) {
  return Status::error("GPUs of compute capability " + std::to_string(gpu.compute_capability / 10) + "." +
                           std::to_string(gpu.compute_capability % 10) + " are not supported; 8.0 is the lowest",
                       "Run on a newer GPU, or on the CPU");
}

Status no_kernel(const Problem& problem, const char* user) {
  return Status::error(std::string("no CUDA kernel multiplies x in ") + name_of(problem.x) + " by W in " +
                           name_of(problem.weight) + user,
                       "Move the layer to the CPU, or quantize it to another scheme");
}

}  // namespace

// ---- Plans ----

bool fuses_norm(const Problem& problem, const Gpu& gpu) {
  Plan plan;
  return kFamilies[0].supports(problem, gpu) && kFamilies[0].plan(problem, gpu, &plan);
}

bool merges(const Problem& problem, std::span<const int64_t> rows, const Gpu& gpu, Plan* plan) {
  if (!is_supported(gpu)) return false;
  if (!sm90_skinny::plan_merged(problem, rows, gpu, plan) && !sm90_ws::plan_merged(problem, rows, gpu, plan)) {
    return false;
  }
  complete(problem, plan);
  return true;
}

Status plan(const Problem& given, const Gpu& gpu, Plan* plan) {
  Problem problem = given;
  if (has_whole_sums(problem)) problem.batch_invariant = false;  // every plan is batch-invariant
  if (!is_supported(gpu)) return too_old(gpu);
  const bool fused = problem.normed || problem.gated;
  bool supported = false;
  for (const KernelFamily& family : kFamilies) {
    *plan = Plan{};
    const bool supports = family.supports(problem, gpu);
    supported |= supports;
    if (supports && family.plan(problem, gpu, plan)) {
      complete(problem, plan);
      return {};
    }
    if (fused) return Status::error("no kernel makes RMSNorm and this product at once", "Ask fuses_norm() first");
  }
  if (!supported) return no_kernel(problem, "");
  return sm80_mma::no_tile(gpu);
}

Status plan(const Problem& problem, const Experts& experts, const Gpu& gpu, Plan* plan) {
  *plan = Plan{};
  if (!is_supported(gpu)) return too_old(gpu);
  if (!sm80_mma::supports_grouped(problem)) return no_kernel(problem, " for experts");
  if (std::max({experts.rows, experts.count, problem.m}) >= INT32_MAX / 2) {
    return Status::error("CUDA kernels of grouped products count rows and experts in 30 bits", "Pass fewer at a time");
  }
  if (problem.x == Format::kInt8 && problem.weight == Format::kInt8 && problem.k > kInt32Columns) {
    return Status::error("an expert with more than 65536 columns of int8 has no CUDA kernel",
                         "Quantize it to another scheme");
  }
  if (!sm90_skinny::plan_grouped(problem, experts, gpu, plan) && !sm90_ws::plan_grouped(problem, experts, gpu, plan)) {
    if (Status status = sm80_mma::plan_grouped(problem, experts, gpu, plan); !status.ok()) return status;
  }
  complete(problem, plan);
  return {};
}

std::vector<Candidate<Plan>> candidates(const Problem& problem, const Gpu& gpu) {
  std::vector<Candidate<Plan>> all;
  sm90_skinny::add_candidates(problem, gpu, &all);
  Candidate<Plan> portable;
  const auto plans = [&](const KernelFamily& family) {
    portable.plan = {};
    return family.supports(problem, gpu) && family.plan(problem, gpu, &portable.plan);
  };
  if (std::ranges::any_of(kPortable, plans)) all.push_back(portable);
  if (sm90_ws::supports(problem, gpu)) sm90_ws::add_candidates(problem, gpu, &all);
  for (Candidate<Plan>& candidate : all) complete(problem, &candidate.plan);
  return all;
}

std::string kernel_name(const Plan& plan) {
  return std::string(name_of(plan.family)) + "_" + plan.formats + "_" + std::to_string(plan.tile_n) + "x" +
         std::to_string(plan.tile_m);
}

std::string to_string(const Plan& plan) {
  using std::to_string;
  return kernel_name(plan) + " (" + plan.instruction + ") warps " + to_string(plan.warps) + " stages " +
         to_string(plan.stages) + " split_k " + to_string(plan.split_k) + (plan.splits_last ? " splits_last" : "") +
         " ctas " + to_string(plan.ctas) + " shared " + to_string(plan.shared_bytes) + " workspace " +
         to_string(plan.workspace_bytes) + " (" + plan.reason + ")" +
         (plan.quantizer[0] == '\0'
              ? ""
              : std::string(" quantizes_x ") + (plan.quantizes_x ? "yes (" : "no (") + plan.quantizer + ")");
}

// ---- Launch: at most three kernels on one stream, for the split of a float32 x, the GEMM, and a reduction ----

#if defined(QAO_WITH_CUDA)
namespace {

const KernelFamily& family_of(const Plan& plan) { return kFamilies[static_cast<int>(plan.family)]; }

// x in the format that the kernel reads.
Status prepare_x(const Problem& problem, int partials, const Arguments& arguments, void* stream, X* x) {
  *x = {arguments.x, arguments.x_stride, 1, 0, problem.x_aligned || problem.quantizes_x, arguments.x_sums};
  if (!is_split(problem) || problem.m == 0) return {};
  return split_x(problem, partials, arguments, stream, x);
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream) {
  if (problem.m == 0) return {};
  X x;
  if (Status status = prepare_x(problem, plan.partials, arguments, stream, &x); !status.ok()) return status;
  return family_of(plan).launch(problem, plan, arguments, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              void* stream) {
  const X x{arguments.x, arguments.x_stride, 1, 0, problem.x_aligned, nullptr};
  const auto launch = plan.family == Family::kSm90Ws ? sm90_ws::launch_merged : sm90_skinny::launch_merged;
  return launch(problem, plan, arguments, parts, x, stream);
}

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts,
              void* stream) {
  if (experts.rows == 0) return {};
  X x;
  if (Status status = prepare_x(problem, 0, arguments, stream, &x); !status.ok()) return status;
  return family_of(plan).launch_grouped(problem, plan, arguments, experts, x, stream);
}
#endif

}  // namespace qao::gemm
