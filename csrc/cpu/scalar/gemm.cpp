// Scalar GEMM of float or quantized x and any quantized W.
#include "cpu/scalar/gemm.h"

#include <algorithm>
#include <cmath>

#include "cpu/gguf.h"
#include "cpu/numeric.h"
#include "cpu/parallel.h"
#include "layout/fp4.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using gemm::Arguments;
using gemm::Problem;

// Element (m, k) of x, minus its zero point and without its scale.
float x_value(const Problem& p, const Arguments& a, int64_t m, int64_t k) {
  const int64_t at = m * a.x_stride + k;
  if (p.x == Format::kInt8) {
    return static_cast<float>(static_cast<const int8_t*>(a.x)[at] - (p.x_zeros ? a.x_zeros[m] : 0));
  }
  if (p.x == Format::kFp8) return from_fp8(static_cast<const uint8_t*>(a.x)[at]);
  return load(a.x, at, p.x_dtype);
}

float x_scale(const Problem& p, const Arguments& a, int64_t m, int64_t block) {
  if (p.x == Format::kFloat) return 1;
  if (p.x_scaling == Scaling::kTensor) return a.x_scales[0];
  return a.x_scales[p.x_scaling == Scaling::kRow ? m : m * p.k_blocks() + block];
}

// Parameters that are constant over a run of columns of W.
struct Group {
  float scale, zero;
};
Group weight_group(const Problem& p, const Arguments& a, int64_t n, int64_t group) {
  if (p.weight == Format::kInt4) {
    const int64_t at = int4::scale_offset(n, group, p.groups(), p.has_zeros ? 2 : 1, 0);
    return {load(a.scales, at, p.scale_dtype),
            p.has_zeros ? load(a.scales, at + int4::kTileN, p.scale_dtype) : float{int4::kSymmetricZero}};
  }
  if (p.weight == Format::kFp4) {
    const int64_t rows = fp4::scale_rows(p.k, p.group_size);
    const auto at = [&](int64_t row) {
      return load(a.scales, int4::scale_offset(n, row, rows, 1, 0), DType::kBFloat16);
    };
    if (p.group_size == fp4::kMxGroup) return {at(group), 0};
    return {at(group) / (at(rows - 3) + at(rows - 2) + at(rows - 1)), 0};
  }
  const float* scales = static_cast<const float*>(a.scales);
  if (p.weight_scaling == Scaling::kTensor) return {scales[0], 0};
  return {scales[p.weight_scaling == Scaling::kRow ? n : n / kScaleBlock * p.k_blocks() + group], 0};
}

float weight_value(const Problem& p, const Arguments& a, int64_t n, int64_t k) {
  const uint8_t* weight = static_cast<const uint8_t*>(a.weight);
  if (is_packed(p.weight)) {
    const int shift = int4::tile_shift(static_cast<int>(n % int4::kTileN));
    const int nibble = weight[int4::weight_offset(n, k, int4::tiles_k(p.k))] >> shift & 15;
    return p.weight == Format::kFp4 ? fp4::kValues[nibble] : static_cast<float>(nibble);
  }
  const uint8_t value = weight[n * p.k + k];
  return p.weight == Format::kFp8 ? from_fp8(value) : static_cast<int8_t>(value);
}

// Columns of a row of GGUF W from `begin` on, at most so many: a multiple of every block's columns.
constexpr int64_t kGgufColumns = 256;
void load_gguf(const Problem& p, const Arguments& a, int64_t n, int64_t begin, float (&values)[kGgufColumns]) {
  const gguf::BlockSize block = gguf::block_size(p.gguf_type);
  const uint8_t* row = static_cast<const uint8_t*>(a.weight) + n * (p.k / block.columns * block.bytes);
  gguf::dequantize_row(p.gguf_type, row, begin, least(kGgufColumns, p.k - begin), values);
}

double gguf_dot(const Problem& p, const Arguments& a, int64_t m, int64_t n) {
  double sum = 0;
  for (int64_t first = 0; first < p.k; first += kGgufColumns) {
    float values[kGgufColumns];
    load_gguf(p, a, n, first, values);
    for (int64_t k = first; k < std::min(first + kGgufColumns, p.k); ++k) {
      sum += static_cast<double>(values[k - first]) * x_value(p, a, m, k);
    }
  }
  return sum;
}

// Element (n, k) of W.
float dense_value(const Problem& p, const Arguments& a, int64_t n, int64_t k) {
  if (p.weight == Format::kGguf) {
    float values[kGgufColumns];
    load_gguf(p, a, n, k / kGgufColumns * kGgufColumns, values);
    return values[k % kGgufColumns];
  }
  const Group group = weight_group(p, a, n, k / (is_packed(p.weight) ? p.group_size : kScaleBlock));
  return (weight_value(p, a, n, k) - group.zero) * group.scale;
}

double dot(const Problem& p, const Arguments& a, int64_t m, int64_t n) {
  if (p.weight == Format::kGguf) return gguf_dot(p, a, m, n);
  const int64_t length = is_packed(p.weight) ? p.group_size : kScaleBlock;
  double sum = 0;
  for (int64_t first = 0, group = 0; first < p.k; first += length, ++group) {
    const Group w = weight_group(p, a, n, group);
    double group_sum = 0;
    for (int64_t k = first; k < std::min(first + length, p.k); ++k) {
      group_sum += static_cast<double>(weight_value(p, a, n, k) - w.zero) * x_value(p, a, m, k);
    }
    sum += group_sum * w.scale * x_scale(p, a, m, group);
  }
  return sum;
}

}  // namespace

void scalar::gemm_row(const Problem& p, const Arguments& a, int64_t m, int64_t begin, int64_t end) {
  for (int64_t n = begin; n < end; ++n) {
    const float bias = p.has_bias ? load(a.bias, n, p.bias_dtype) : 0.0f;
    store(a.y, m * p.n + n, p.y_dtype, static_cast<float>(dot(p, a, m, n)) + bias);
  }
}

void scalar::gemm(const Problem& p, const Arguments& a, int64_t begin, int64_t end) {
  for (int64_t m = 0; m < p.m; ++m) scalar::gemm_row(p, a, m, begin, end);
}

void scalar::gemm_add_nonfinite(const Problem& p, const Arguments& a, int64_t m, int64_t begin, int64_t end) {
  for (int64_t k = 0; k < p.k; ++k) {
    const float x = x_value(p, a, m, k);
    if (std::isfinite(x)) continue;
    if (std::isnan(x)) {  // y is NaN for any weights: stop here
      for (int64_t n = begin; n < end; ++n) store(a.y, m * p.n + n, p.y_dtype, x);
      return;
    }
    for (int64_t n = begin; n < end; ++n) {
      const float y = load(a.y, m * p.n + n, p.y_dtype);
      store(a.y, m * p.n + n, p.y_dtype, y + x * dense_value(p, a, n, k));
    }
  }
}

}  // namespace qao::cpu
