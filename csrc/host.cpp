// qao._host: what Python may ask about kernels without running one. No tensors, no torch; the operators work without
// it.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>

#include "cpu/int4_mm.h"
#include "cpu/isa.h"
#include "int4_mm/layout.h"
#include "qao/int4_mm.h"

namespace py = pybind11;

namespace qao {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};
constexpr cpu::Isa kIsas[] = {cpu::Isa::kScalar, cpu::Isa::kAvx2, cpu::Isa::kAvx512, cpu::Isa::kAvx512Bf16,
                              cpu::Isa::kAmx};

template <typename Value, size_t count>
Value named(const std::string& name, const char* what, const Value (&values)[count]) {
  std::string names;
  for (Value value : values) {
    if (name == name_of(value)) return value;
    names += std::string(names.empty() ? "" : ", ") + name_of(value);
  }
  throw std::invalid_argument(std::string(what) + " '" + name + "' is not one of " + names);
}

void check(const Status& status) {
  if (!status.ok()) throw std::runtime_error(status.message());
}

int4_mm::Problem int4_problem(int64_t m, int64_t n, int64_t k, int64_t group_size, bool has_zeros, bool has_bias,
                              const std::string& x_dtype, const std::string& scale_dtype, bool x_aligned) {
  if (m < 0 || n < 1 || k < 1) throw std::invalid_argument("m must be at least 0, n and k at least 1");
  if (group_size < 1 && group_size != -1) throw std::invalid_argument("group_size must be positive, or -1");
  int4_mm::Problem problem;
  problem.m = m;
  problem.n = n;
  problem.k = k;
  problem.group_size = group_size == -1 ? k : group_size;
  problem.has_zeros = has_zeros;
  problem.has_bias = has_bias;
  problem.x_aligned = x_aligned;
  problem.x_dtype = problem.bias_dtype = named(x_dtype, "x_dtype", kDTypes);
  problem.scale_dtype = named(scale_dtype, "scale_dtype", kDTypes);
  return problem;
}

py::dict int4_plan(int64_t m, int64_t n, int64_t k, int64_t group_size, bool has_zeros, bool has_bias,
                   const std::string& x_dtype, const std::string& scale_dtype, bool x_aligned, int compute_capability,
                   int num_sms, int shared_bytes) {
  const Gpu gpu{compute_capability, num_sms, shared_bytes};
  int4_mm::Plan plan;
  check(int4_mm::plan(int4_problem(m, n, k, group_size, has_zeros, has_bias, x_dtype, scale_dtype, x_aligned), gpu,
                      &plan));
  py::dict result;
  result["kernel"] = plan.kernel;
  result["reason"] = plan.reason;
  result["config"] = plan.config;
  result["tile_n"] = plan.tile_n;
  result["tile_m"] = plan.tile_m;
  result["warps"] = plan.warps;
  result["stages"] = plan.stages;
  result["split_k"] = plan.split_k;
  result["ctas"] = plan.ctas;
  result["shared_bytes"] = plan.shared_bytes;
  result["workspace_bytes"] = plan.workspace_bytes;
  result["text"] = to_string(plan);
  return result;
}

std::string int4_cpu_kernel(int64_t m, int64_t n, int64_t k, int64_t group_size, bool has_zeros, bool has_bias,
                            const std::string& x_dtype, const std::string& scale_dtype, bool x_aligned,
                            const std::optional<std::string>& isa_name) {
  cpu::Isa isa = cpu::Isa::kScalar;
  if (isa_name) {
    isa = named(*isa_name, "isa", kIsas);
  } else {
    check(cpu::selected_isa(&isa));
  }
  return cpu::int4_mm_kernel(int4_problem(m, n, k, group_size, has_zeros, has_bias, x_dtype, scale_dtype, x_aligned),
                             isa);
}

// One row a CUDA tile that some plan uses, one row an instruction set on the CPU.
py::list kernels() {
  py::list rows;
  std::set<std::pair<std::string, int>> tiles;
  int4_mm::Problem problem;
  problem.n = problem.k = 4096, problem.group_size = 128;
  for (const Gpu& gpu : {Gpu{80, 108, 166912}, Gpu{86, 84, 101376}, Gpu{90, 132, 232448}}) {
    for (problem.m = 1; problem.m <= 4096; problem.m *= 2) {
      int4_mm::Plan plan;
      check(int4_mm::plan(problem, gpu, &plan));
      if (!tiles.emplace(plan.kernel, plan.config).second) continue;
      py::dict row;
      row["op"] = "int4_mm";
      row["device"] = "cuda";
      row["kernel"] = plan.kernel;
      row["config"] = plan.config;
      row["tile_n"] = plan.tile_n;
      row["tile_m"] = plan.tile_m;
      row["warps"] = plan.warps;
      row["stages"] = plan.stages;
      row["shared_bytes"] = plan.shared_bytes;
      rows.append(row);
    }
  }
  for (cpu::Isa isa : kIsas) {
    std::set<std::string> names;
    for (DType dtype : kDTypes) {
      for (int64_t m = 1; m <= 4096; m *= 2) {
        problem.m = m, problem.x_dtype = dtype;
        names.insert(cpu::int4_mm_kernel(problem, isa));
      }
    }
    py::dict row;
    row["op"] = "int4_mm";
    row["device"] = "cpu";
    row["isa"] = name_of(isa);
    row["kernels"] = py::tuple(py::cast(names));
    rows.append(row);
  }
  return rows;
}

py::dict cpu_features() {
  cpu::Isa selected;
  const Status status = cpu::selected_isa(&selected);
  py::dict result;
  result["detected"] = name_of(cpu::detected_isa());
  result["selected"] = status.ok() ? py::object(py::str(name_of(selected))) : py::none();
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
  result["TILE_N"] = int4_mm::kTileN;
  result["TILE_K"] = int4_mm::kTileK;
  result["TILE_BYTES"] = int4_mm::kTileBytes;
  return result;
}

}  // namespace
}  // namespace qao

PYBIND11_MODULE(_host, m) {
  using py::arg;
  m.doc() = "Plans, kernel table, CPU features and build information of qao. M tokens, N out_features, K in_features.";
  m.def("int4_plan", &qao::int4_plan, arg("m"), arg("n"), arg("k"), arg("group_size"), arg("has_zeros"),
        arg("has_bias"), arg("x_dtype"), arg("scale_dtype"), arg("x_aligned"), arg("compute_capability"),
        arg("num_sms"), arg("shared_bytes"),
        "The plan of an int4_mm on a GPU, as a dict. compute_capability is 10 * major + minor; shared_bytes is the "
        "opt-in limit of one CTA. Needs no GPU. Raises RuntimeError where no kernel runs the problem.");
  m.def("int4_cpu_kernel", &qao::int4_cpu_kernel, arg("m"), arg("n"), arg("k"), arg("group_size"), arg("has_zeros"),
        arg("has_bias"), arg("x_dtype"), arg("scale_dtype"), arg("x_aligned"), arg("isa") = py::none(),
        "Name of the CPU kernel of an int4_mm at an instruction set, by default the selected one.");
  m.def("kernels", &qao::kernels,
        "Every kernel: one dict a CUDA tile that some plan uses, one an instruction set of the CPU.");
  m.def("cpu_features", &qao::cpu_features, "detected and selected instruction set, or error: why none is selected.");
  m.def("build_info", &qao::build_info,
        "version, cuda (toolkit, or None), archs, compiler, torch (headers), torch_target (oldest torch it loads on).");
  m.def("layout", &qao::layout, "Sizes of the packed int4 layout: TILE_N, TILE_K, TILE_BYTES.");
}
