// qao._host: what Python may ask about kernels without running one. No tensors, no torch; the operators work without
// it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <type_traits>
#include <vector>

#include "cpu/mm.h"
#include "int4/layout.h"
#include "qao/int4_mm.h"
#include "qao/mm8.h"

namespace py = pybind11;

namespace qao {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr Format kFormats[] = {Format::kFloat, Format::kInt8, Format::kFp8, Format::kInt4};
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

// ---- problems: plain attributes, all with defaults, given to the constructor by name ----

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

// The attributes that both kinds of problem have.
template <typename Problem>
py::class_<Problem> define_problem(py::module_& m, const char* name, const char* doc) {
  py::class_<Problem> type(m, name, doc);
  define_init(type);
  define(type, "m", &Problem::m);
  define(type, "n", &Problem::n);
  define(type, "k", &Problem::k);
  define(type, "group_size", &Problem::group_size);
  define(type, "has_zeros", &Problem::has_zeros);
  define(type, "has_bias", &Problem::has_bias);
  define(type, "x_aligned", &Problem::x_aligned);
  define(type, "x_dtype", &Problem::x_dtype);
  define(type, "scale_dtype", &Problem::scale_dtype);
  define(type, "bias_dtype", &Problem::bias_dtype);
  return type;
}

// As an operator would state it: y has the dtype of x, or of what x was quantised from, and blocks go with blocks.
int4_mm::Problem resolved(int4_mm::Problem problem) {
  if (problem.group_size == -1) problem.group_size = problem.k;
  return problem;
}
mm8::Problem resolved(mm8::Problem problem) {
  if (problem.group_size == -1) problem.group_size = problem.k;
  if (problem.x == Format::kFp8 && problem.weight_scaling == Scaling::kBlock) problem.x_scaling = Scaling::kBlock;
  problem.y_dtype = problem.x_dtype;
  problem.quantizes_x = problem.x != Format::kFloat;
  return problem;
}

// ---- what runs a problem ----

Status make_plan(const int4_mm::Problem& problem, const Gpu& gpu, int4_mm::Plan* plan) {
  return int4_mm::plan(problem, gpu, plan);
}
Status make_plan(const mm8::Problem& problem, const Gpu& gpu, mm8::Plan* plan) { return mm8::plan(problem, gpu, plan); }
template <typename Problem>
using PlanOf = std::conditional_t<std::is_same_v<Problem, int4_mm::Problem>, int4_mm::Plan, mm8::Plan>;

const mm8::Problem& on_cpu(const mm8::Problem& problem) { return problem; }
mm8::Problem on_cpu(const int4_mm::Problem& problem) { return cpu::as_mm8(problem); }

// The part of a plan that is the kernel, whatever the problem's sizes.
template <typename Plan>
py::dict kernel_facts(const Plan& plan) {
  py::dict result;
  result["kernel"] = plan.kernel;
  result["instruction"] = plan.instruction;
  result["config"] = plan.config;
  result["tile_n"] = plan.tile_n;
  result["tile_m"] = plan.tile_m;
  result["warps"] = plan.warps;
  result["stages"] = plan.stages;
  return result;
}

template <typename Problem>
py::dict plan(const Problem& problem, const Gpu& gpu) {
  PlanOf<Problem> plan;
  check(make_plan(resolved(problem), gpu, &plan));
  py::dict result = kernel_facts(plan);
  result["reason"] = plan.reason;
  result["shared_bytes"] = plan.shared_bytes;
  result["split_k"] = plan.split_k;
  result["ctas"] = plan.ctas;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["text"] = to_string(plan);
  return result;
}

template <typename Problem>
std::string cpu_kernel(const Problem& problem, const std::optional<std::string>& level) {
  cpu::Features features = cpu::kScalar;
  if (level) {
    features = level_named(*level).features;
  } else {
    check(cpu::selected_features(&features));
  }
  return cpu::mm_kernel(on_cpu(resolved(problem)), features);
}

// ---- the kernel table ----

// A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
constexpr Gpu kGpus[] = {{80, 108, 166912}, {86, 82, 101376},   {89, 128, 101376},
                         {90, 132, 232448}, {100, 148, 232448}, {120, 170, 101376}};
constexpr int64_t kMostTokens = 4096;

// Adds what the choices for one op name: a row a CUDA tile of a compute capability, a row a CPU kernel of an
// instruction set. Nothing here knows a kernel; where a plan fails there is none.
template <typename Problem>
void add_kernels(const std::string& op, Problem problem, py::list& rows) {
  problem.n = problem.k = 4096, problem.group_size = 128;
  std::set<std::tuple<int, std::string, std::string, int>> on_gpus;
  std::set<std::tuple<std::string, std::string>> on_cpus;
  for (DType dtype : kDTypes) {
    problem.x_dtype = dtype;
    for (problem.m = 1; problem.m <= kMostTokens; problem.m *= 2) {
      for (const Gpu& gpu : kGpus) {
        PlanOf<Problem> plan;
        if (!make_plan(resolved(problem), gpu, &plan).ok()) continue;
        if (!on_gpus.emplace(gpu.compute_capability, plan.kernel, plan.instruction, plan.config).second) continue;
        py::dict row = kernel_facts(plan);
        row["op"] = op;
        row["device"] = "cuda";
        row["compute_capability"] = gpu.compute_capability;
        rows.append(row);
      }
      for (const cpu::Level& level : cpu::levels()) {
        const std::string kernel = cpu::mm_kernel(on_cpu(resolved(problem)), level.features);
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
  add_kernels("int4_mm", int4_mm::Problem{}, rows);
  for (Format x : {Format::kFloat, Format::kInt8, Format::kFp8}) {
    for (Format weight : {Format::kInt8, Format::kFp8, Format::kInt4}) {
      const bool exists = x == Format::kFloat ? weight != Format::kInt4 : weight == x || weight == Format::kInt4;
      if (!exists) continue;
      mm8::Problem problem;
      problem.x = x;
      problem.weight = weight;
      add_kernels((x == Format::kFloat ? "" : std::string(name_of(x)) + "_") + name_of(weight) + "_mm", problem, rows);
    }
  }
  return rows;
}

py::dict cpu_features() {
  cpu::Features selected;
  const Status status = cpu::selected_features(&selected);
  py::dict result;
  result["detected"] = cpu::highest_level(cpu::detected_features()).name;
  result["features"] = cpu::names_of(cpu::detected_features());
  result["selected"] = status.ok() ? py::object(py::str(cpu::highest_level(selected).name)) : py::none();
  result["error"] = status.ok() ? py::object(py::none()) : py::str(status.message());
  return result;
}

py::dict build_info() {
  const std::string cuda = QAO_CUDA_VERSION;
  py::dict result;
  result["version"] = QAO_VERSION;
  result["cuda"] = cuda.empty() ? py::object(py::none()) : py::str(cuda);  // toolkit; None: built without CUDA kernels
  result["archs"] = py::str(QAO_CUDA_ARCHS).attr("split")();
  result["compiler"] = QAO_COMPILER;
  result["torch"] = QAO_TORCH_VERSION;
  result["torch_target"] = QAO_TORCH_TARGET;
  return result;
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

  define_problem<int4_mm::Problem>(
      m, "Int4Problem", "An int4_mm. Attributes are keyword arguments of the constructor; group_size -1 stands for k.");
  auto mm8_problem = define_problem<mm8::Problem>(
      m, "Mm8Problem",
      "A product with an operand of eight bits: x is 'float', 'int8' or 'fp8', weight 'int8', 'fp8' or 'int4'; x_dtype "
      "is that of y, and of x before it was quantised.");
  define(mm8_problem, "x", &mm8::Problem::x);
  define(mm8_problem, "weight", &mm8::Problem::weight);
  define(mm8_problem, "x_scaling", &mm8::Problem::x_scaling);
  define(mm8_problem, "weight_scaling", &mm8::Problem::weight_scaling);
  define(mm8_problem, "x_zeros", &mm8::Problem::x_zeros);
  define(mm8_problem, "fast_accum", &mm8::Problem::fast_accum);
  define(mm8_problem, "static_scale", &mm8::Problem::static_scale);
  define(mm8_problem, "weight_aligned", &mm8::Problem::weight_aligned);
  py::class_<Gpu> gpu(
      m, "Gpu",
      "A GPU's numbers: compute_capability (10 * major + minor), num_sms, and shared_bytes_per_cta, the "
      "opt-in limit of one CTA.");
  define_init(gpu);
  define(gpu, "compute_capability", &Gpu::compute_capability);
  define(gpu, "num_sms", &Gpu::num_sms);
  define(gpu, "shared_bytes_per_cta", &Gpu::shared_bytes_per_cta);

  constexpr const char* kPlanDoc =
      "The plan of a problem on a GPU, as a dict. Needs no GPU. Raises RuntimeError where no kernel runs the problem.";
  m.def("plan", &plan<int4_mm::Problem>, arg("problem"), arg("gpu"), kPlanDoc);
  m.def("plan", &plan<mm8::Problem>, arg("problem"), arg("gpu"), kPlanDoc);
  constexpr const char* kCpuKernelDoc =
      "Name of the CPU kernel of a problem at an instruction set, by default the selected one.";
  m.def("cpu_kernel", &cpu_kernel<int4_mm::Problem>, arg("problem"), arg("isa") = py::none(), kCpuKernelDoc);
  m.def("cpu_kernel", &cpu_kernel<mm8::Problem>, arg("problem"), arg("isa") = py::none(), kCpuKernelDoc);
  m.def("kernels", &kernels,
        "Every kernel with the instruction that multiplies: one dict a CUDA tile that some plan uses on a compute "
        "capability, one a CPU kernel of an instruction set.");
  m.def("cpu_features", &cpu_features,
        "detected and selected level, features (all that were detected, as in /proc/cpuinfo), or error: why none is "
        "selected.");
  m.def("build_info", &build_info,
        "version, cuda (toolkit, or None), archs, compiler, torch (headers), torch_target (oldest torch it loads on).");
  m.def("layout", &layout, "Sizes of the packed int4 layout: TILE_N, TILE_K, TILE_BYTES.");
}
