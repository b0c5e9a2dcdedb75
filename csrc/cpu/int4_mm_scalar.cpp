#include "cpu/int4_mm_scalar.h"

#include <algorithm>
#include <cmath>

#include "cpu/numeric.h"
#include "int4_mm/layout.h"

namespace qao::cpu {
namespace {

using int4_mm::Arguments;
using int4_mm::Problem;

struct Group {
  float scale, zero;
};
Group load_group(const Problem& p, const Arguments& a, int64_t n, int64_t g) {
  const int64_t offset = int4_mm::scale_offset(n, g, p.groups(), p.has_zeros ? 2 : 1, 0);
  return {load(a.scales, offset, p.scale_dtype),
          p.has_zeros ? load(a.scales, offset + int4_mm::kTileN, p.scale_dtype) : float{int4_mm::kSymmetricZero}};
}

int nibble(const Problem& p, const Arguments& a, int64_t n, int64_t k) {
  const int shift = int4_mm::tile_shift(static_cast<int>(n % int4_mm::kTileN));
  return a.weight[int4_mm::weight_offset(n, k, int4_mm::tiles_k(p.k))] >> shift & 15;
}

float dot(const Problem& p, const Arguments& a, int64_t m, int64_t n) {
  double sum = 0;  // one long chain of additions: in float32 it would lose to a blocked matmul
  for (int64_t g = 0; g < p.groups(); ++g) {
    const Group group = load_group(p, a, n, g);
    double group_sum = 0;
    const int64_t end = std::min(p.k, (g + 1) * p.group_size);
    for (int64_t k = g * p.group_size; k < end; ++k) {
      group_sum += static_cast<double>(static_cast<float>(nibble(p, a, n, k)) - group.zero) *
                   load(a.x, m * a.x_stride + k, p.x_dtype);
    }
    sum += group.scale * group_sum;
  }
  return static_cast<float>(sum);
}

}  // namespace

void int4_mm_scalar_row(const Problem& p, const Arguments& a, int64_t m, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const float bias = p.has_bias ? load(a.bias, n, p.bias_dtype) : 0.0f;
    store(a.y, m * p.n + n, p.x_dtype, dot(p, a, m, n) + bias);
  }
}

void int4_mm_scalar(const Problem& p, const Arguments& a, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < p.m; ++m) int4_mm_scalar_row(p, a, m, begin, end);
}

void int4_add_nonfinite(const Problem& p, const Arguments& a, int64_t m, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < p.k; ++k) {
    const float x = load(a.x, m * a.x_stride + k, p.x_dtype);
    if (std::isfinite(x)) continue;
    if (std::isnan(x)) {  // whatever the weights: the rest need not be looked at
      for (int64_t n = begin; n < end; ++n) store(a.y, m * p.n + n, p.x_dtype, x);
      return;
    }
    for (int64_t n = begin; n < end; ++n) {
      const Group group = load_group(p, a, n, k / p.group_size);
      const float w = (static_cast<float>(nibble(p, a, n, k)) - group.zero) * group.scale;
      store(a.y, m * p.n + n, p.x_dtype, load(a.y, m * p.n + n, p.x_dtype) + x * w);
    }
  }
}

}  // namespace qao::cpu
