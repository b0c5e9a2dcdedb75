// int4_mm on the CPU: which kernel runs, and the scalar one.
#include "cpu/int4_mm.h"

#include <algorithm>

#include "cpu/numeric.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::Arguments;
using int4_mm::Problem;

// One row of W against one row of x, in float32, group by group.
float dot(const Problem& p, const Arguments& a, int64_t m, int64_t n) {
  const int parameters = p.has_zeros ? 2 : 1;
  const int64_t k_tiles = int4_mm::tiles_k(p.k), groups = p.groups();
  const int shift = int4_mm::tile_shift(static_cast<int>(n % int4_mm::kTileN));
  float sum = 0;
  for (int64_t g = 0; g < groups; ++g) {
    const float scale = load(a.scales, int4_mm::scale_offset(n, g, groups, parameters, 0), p.scale_dtype);
    const float zero = p.has_zeros
                           ? load(a.scales, int4_mm::scale_offset(n, g, groups, parameters, 1), p.scale_dtype)
                           : int4_mm::kSymmetricZero;
    float group_sum = 0;
    const int64_t end = std::min(p.k, (g + 1) * p.group_size);
    for (int64_t k = g * p.group_size; k < end; ++k) {
      const int q = a.weight[int4_mm::weight_offset(n, k, k_tiles)] >> shift & 15;
      group_sum += (static_cast<float>(q) - zero) * load(a.x, m * a.x_stride + k, p.x_dtype);
    }
    sum += scale * group_sum;
  }
  return sum;
}

void int4_mm_scalar(const Problem& p, const Arguments& a, const Threads& threads) {
  threads.for_each([&](int index) {
    for (int64_t n = p.n * index / threads.count; n < p.n * (index + 1) / threads.count; ++n) {
      const float bias = p.has_bias ? load(a.bias, n, p.bias_dtype) : 0.0f;
      for (int64_t m = 0; m < p.m; ++m) store(a.y, m * p.n + n, p.x_dtype, dot(p, a, m, n) + bias);
    }
  });
}

}  // namespace

const char* int4_mm_kernel(const Problem&, Isa) { return "scalar"; }

Status int4_mm(const Problem& problem, const Arguments& arguments, const Threads& threads) {
  Isa isa;
  if (Status status = selected_isa(&isa); !status.ok()) return status;
  int4_mm_scalar(problem, arguments, threads);
  return {};
}

}  // namespace qao::cpu
