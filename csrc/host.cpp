// Python module qao._host: plans, kernel table, CPU features and build information.
//
// Does not run kernels. Free of tensors and torch. The operators do not depend on it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cpu/gemm/driver.h"
#include "layout/int4.h"
#include "qao/gemm.h"
#include "qao/grouped_gemm.h"

namespace py = pybind11;

namespace qao {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Scaling kScalings[] = {Scaling::kTensor, Scaling::kRow, Scaling::kBlock};

const auto& all(DType) { return kDTypes; }
const auto& all(Format) { return kFormats; }
const auto& all(Scaling) { return kScalings; }

template <typename Enum>
Enum named(const std::string& name, const char* what) {
  std::string names;
  for (Enum value : all(Enum{})) {
    if (name == name_of(value)) return value;
    names += std::string(names.empty() ? "" : ", ") + name_of(value);
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not one of " + names);
}

const cpu::Level& level_named(const std::string& name) {
  std::string names;
  for (const cpu::Level& level : cpu::levels()) {
    if (name == level.name) return level;
    names += std::string(names.empty() ? "" : ", ") + level.name;
  }
  throw std::invalid_argument("isa '" + name + "' is not one of " + names);
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

// ---- Problems: plain attributes with defaults, keyword arguments of the constructor ----

template <typename Class>
void define_init(py::class_<Class>& type) {
  type.def(py::init([](const py::kwargs& attributes) {
    const py::object self = py::cast(Class{});
    for (const auto& [name, value] : attributes) py::setattr(self, name, value);
    return self.cast<Class>();
  }));
}

// Enumerations are strings in Python.
template <typename Class, typename Value>
void define(py::class_<Class>& type, const char* name, Value Class::* member) {
  if constexpr (std::is_enum_v<Value>) {
    type.def_property(
        name, [member](const Class& self) { return name_of(self.*member); },
        [name, member](Class& self, const std::string& value) { self.*member = named<Value>(value, name); });
  } else {
    type.def_readwrite(name, member);
  }
}

// Completes a problem as the operators do: y has the float dtype of x, block scales apply to both operands, and the
// scale of a row's only group is a row scale.
gemm::Problem resolved(gemm::Problem problem) {
  if (problem.group_size == -1) problem.group_size = problem.k;
  if (problem.x == Format::kFp8 && problem.weight_scaling == Scaling::kBlock) problem.x_scaling = Scaling::kBlock;
  problem.y_dtype = problem.x_dtype;
  problem.quantizes_x = problem.x != Format::kFloat;
  if (problem.weight == Format::kInt4 && !problem.has_zeros) problem.row_scales |= problem.group_size >= problem.k;
  return problem;
}

// ---- Plans ----

// The part of a plan that identifies the kernel, independent of sizes.
py::dict kernel_facts(const gemm::Plan& plan) {
  py::dict result;
  result["kernel"] = kernel_name(plan);
  result["family"] = name_of(plan.family);
  result["instruction"] = plan.instruction;
  result["config"] = plan.config;
  result["tile_n"] = plan.tile_n;
  result["tile_m"] = plan.tile_m;
  result["warps"] = plan.warps;
  result["stages"] = plan.stages;
  return result;
}

py::dict plan(const gemm::Problem& problem, const Gpu& gpu, int64_t experts) {
  gemm::Plan plan;
  if (experts == 0) {
    check(gemm::plan(resolved(problem), gpu, &plan));
  } else {
    gemm::Experts routed;
    routed.count = experts, routed.rows = problem.m;
    check(gemm::plan(resolved(problem), routed, gpu, &plan));
  }
  py::dict result = kernel_facts(plan);
  result["reason"] = plan.reason;
  result["shared_bytes"] = plan.shared_bytes;
  result["split_k"] = plan.split_k;
  result["ctas"] = plan.ctas;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["text"] = to_string(plan);
  return result;
}

std::string cpu_kernel(const gemm::Problem& problem, const std::optional<std::string>& level) {
  cpu::Features features = cpu::kScalar;
  if (level) {
    features = level_named(*level).features;
  } else {
    check(cpu::selected_features(&features));
  }
  return cpu::gemm_kernel(resolved(problem), features);
}

// ---- The kernel table ----

// A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
constexpr Gpu kGpus[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                         {90, 132, 232448}, {100, 148, 232448}, {120, 170, 101376}};
constexpr int64_t kMostTokens = 4096;

// Adds the kernels selected for one operator: a row per CUDA tile and compute capability, and a row per CPU kernel and
// instruction set. Derived from plans only; a problem without a plan adds no row.
void add_kernels(const std::string& op, gemm::Problem problem, py::list& rows) {
  problem.n = problem.k = 4096, problem.group_size = 128;
  problem.scale_dtype = DType::kBFloat16;
  std::set<std::tuple<int, std::string, std::string>> on_gpus;
  std::set<std::tuple<std::string, std::string>> on_cpus;
  for (DType dtype : kDTypes) {
    problem.x_dtype = dtype;
    for (problem.m = 1; problem.m <= kMostTokens; problem.m *= 2) {
      for (const Gpu& gpu : kGpus) {
        gemm::Plan plan;
        if (!gemm::plan(resolved(problem), gpu, &plan).ok()) continue;
        if (!on_gpus.emplace(gpu.compute_capability, kernel_name(plan), plan.instruction).second) continue;
        py::dict row = kernel_facts(plan);
        row["op"] = op;
        row["device"] = "cuda";
        row["compute_capability"] = gpu.compute_capability;
        rows.append(row);
      }
      for (const cpu::Level& level : cpu::levels()) {
        const std::string kernel = cpu::gemm_kernel(resolved(problem), level.features);
        if (!on_cpus.emplace(level.name, kernel).second) continue;
        py::dict row;
        row["op"] = op;
        row["device"] = "cpu";
        row["isa"] = level.name;
        row["kernel"] = kernel;
        row["instruction"] = kernel.substr(kernel.rfind(' ') + 1);
        rows.append(row);
      }
    }
  }
}

py::list kernels() {
  py::list rows;
  for (Format x : {Format::kFloat, Format::kInt8, Format::kFp8}) {
    for (Format weight : {Format::kInt8, Format::kFp8, Format::kInt4, Format::kFp4}) {
      if (x != Format::kFloat && weight != x && weight != Format::kInt4) continue;
      gemm::Problem problem;
      problem.x = x;
      problem.weight = weight;
      add_kernels((x == Format::kFloat ? "" : std::string(name_of(x)) + "_") + name_of(weight) + "_mm", problem, rows);
    }
  }
  return rows;
}

py::dict layout() {
  py::dict result;
  result["TILE_N"] = int4::kTileN;
  result["TILE_K"] = int4::kTileK;
  result["TILE_BYTES"] = int4::kTileBytes;
  return result;
}

}  // namespace
}  // namespace qao

PYBIND11_MODULE(_host, m) {
  using py::arg;
  using namespace qao;
  m.doc() = "Plans, kernel table, CPU features and build information of qao. M tokens, N out_features, K in_features.";

  py::class_<gemm::Problem> problem(
      m, "Problem",
      "A GEMM: x is 'float', 'int8' or 'fp8', weight 'int8', 'fp8', 'int4' or 'fp4'; x_dtype is that of y, and of x "
      "before quantization. Attributes are keyword arguments of the constructor; group_size -1 means k.");
  define_init(problem);
  define(problem, "m", &gemm::Problem::m);
  define(problem, "n", &gemm::Problem::n);
  define(problem, "k", &gemm::Problem::k);
  define(problem, "group_size", &gemm::Problem::group_size);
  define(problem, "has_zeros", &gemm::Problem::has_zeros);
  define(problem, "has_bias", &gemm::Problem::has_bias);
  define(problem, "x_aligned", &gemm::Problem::x_aligned);
  define(problem, "x_dtype", &gemm::Problem::x_dtype);
  define(problem, "scale_dtype", &gemm::Problem::scale_dtype);
  define(problem, "bias_dtype", &gemm::Problem::bias_dtype);
  define(problem, "x", &gemm::Problem::x);
  define(problem, "weight", &gemm::Problem::weight);
  define(problem, "x_scaling", &gemm::Problem::x_scaling);
  define(problem, "weight_scaling", &gemm::Problem::weight_scaling);
  define(problem, "x_zeros", &gemm::Problem::x_zeros);
  define(problem, "row_scales", &gemm::Problem::row_scales);
  define(problem, "fast_accum", &gemm::Problem::fast_accum);
  define(problem, "static_scale", &gemm::Problem::static_scale);
  define(problem, "x_rotation", &gemm::Problem::x_rotation);
  define(problem, "weight_aligned", &gemm::Problem::weight_aligned);
  define(problem, "batch_invariant", &gemm::Problem::batch_invariant);
  py::class_<Gpu> gpu(
      m, "Gpu",
      "A GPU's numbers: compute_capability (10 * major + minor), num_sms, and shared_bytes_per_cta, the "
      "opt-in limit of one CTA.");
  define_init(gpu);
  define(gpu, "compute_capability", &Gpu::compute_capability);
  define(gpu, "num_sms", &Gpu::num_sms);
  define(gpu, "shared_bytes_per_cta", &Gpu::shared_bytes_per_cta);

  constexpr const char* kPlanDoc =
      "The plan of a problem on a GPU, as a dict; with experts, of a grouped GEMM with that many. Needs no GPU. "
      "Raises RuntimeError if no kernel runs the problem.";
  m.def("plan", &plan, arg("problem"), arg("gpu"), arg("experts") = 0, kPlanDoc);
  constexpr const char* kCpuKernelDoc =
      "Name of the CPU kernel of a problem at an instruction set, by default the selected one.";
  m.def("cpu_kernel", &cpu_kernel, arg("problem"), arg("isa") = py::none(), kCpuKernelDoc);
  m.def("kernels", &kernels,
        "Every kernel with the instruction that multiplies: one dict a CUDA tile that some plan uses on a compute "
        "capability, one a CPU kernel of an instruction set.");
  m.def("layout", &layout, "Sizes of the packed int4 layout: TILE_N, TILE_K, TILE_BYTES.");
}
