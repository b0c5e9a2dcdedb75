// int4_mm on the CPU is the case of float x and int4 W of float_mm.
#include "cpu/int4_mm.h"

#include "cpu/float_mm.h"

namespace qao::cpu {
namespace {

mm8::Problem as_mm8(const int4_mm::Problem& p) {
  mm8::Problem problem;
  problem.m = p.m, problem.n = p.n, problem.k = p.k;
  problem.weight = Format::kInt4;
  problem.x_dtype = problem.y_dtype = p.x_dtype;
  problem.group_size = p.group_size;
  problem.has_zeros = p.has_zeros, problem.scale_dtype = p.scale_dtype;
  problem.has_bias = p.has_bias, problem.bias_dtype = p.bias_dtype;
  return problem;
}

}  // namespace

KernelName int4_mm_kernel(const int4_mm::Problem& problem, Isa isa) { return float_mm_kernel(as_mm8(problem), isa); }

Status int4_mm(const int4_mm::Problem& problem, const int4_mm::Arguments& a, const Threads& threads) {
  mm8::Arguments arguments;
  arguments.x = a.x;
  arguments.x_stride = a.x_stride;
  arguments.weight = a.weight;
  arguments.scales = a.scales;
  arguments.bias = a.bias;
  arguments.y = a.y;
  return float_mm(as_mm8(problem), arguments, threads);
}

}  // namespace qao::cpu
