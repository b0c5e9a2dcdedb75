// Rows and threads of quantize_weight.h. quantize_group.h has the loops over a group of integers.
#include "cpu/quantize_weight.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "cpu/numeric.h"
#include "cpu/quantize.h"
#include "cpu/quantize_kernels.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int64_t kPieceValues = 1 << 15;  // values that a thread takes at a time: a fraction of a millisecond
constexpr float kLargestFp8 = 448, kLargestFp4 = 6;
constexpr float kSmallestDivisor = 0x1p-100f, kLargestDivisor = 0x1p100f;
constexpr int64_t kPadding = 16;  // kernels read whole vectors

struct Squares {
  double error = 0, norm = 0;
};

// Row n of the weight in float32.
struct Source {
  Source(int64_t n, int64_t k, DType dtype, const WeightArguments& a) {
    problem.m = n, problem.k = k, problem.x_dtype = dtype;
    arguments.x = a.weight, arguments.x_stride = a.weight_stride;
  }
  quantize::Problem problem;
  quantize::Arguments arguments;
};

// Calls task(n, values) for every row, zero-padded to a whole vector. Threads take rows dynamically.
template <typename Task>
void for_each_row(const Threads& threads, const QuantizeKernels& kernels, const Source& source, const Task& task) {
  const int64_t k = source.problem.k, padded = divide_up(k, kPadding) * kPadding;
  share(threads, source.problem.m, std::max<int64_t>(1, kPieceValues / k), [&](int64_t begin, int64_t end) {
    float* values = static_cast<float*>(scratch(Scratch::kActivations, padded * static_cast<int64_t>(sizeof(float))));
    std::fill(values + k, values + padded, 0.0f);
    for (int64_t n = begin; n < end; ++n) {
      kernels.values(source.problem, source.arguments, n, values);
      task(n, values);
    }
  });
}

float largest_magnitude(const QuantizeKernels& kernels, const float* values, int64_t count) {
  const QuantizeRange range = kernels.range({values}, count);
  return range.finite ? std::max(-range.low, range.high) : std::numeric_limits<float>::infinity();
}

// Sums by row, so that the result does not depend on threads.
void add_up(const std::vector<Squares>& squares, double* sums) {
  sums[0] = sums[1] = 0;
  for (const Squares& row : squares) sums[0] += row.error, sums[1] += row.norm;
}

}  // namespace

Status quantize_weight(const WeightProblem& p, const WeightArguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const QuantizeKernels& kernels = quantize_kernels(features);
  const GroupRules rules = groups::rules_of(p);
  std::vector<Squares> squares(static_cast<size_t>(p.n));
  std::vector<float> importance(static_cast<size_t>(divide_up(p.k, kPadding) * kPadding), 0.0f);
  a.importance ? void(std::copy(a.importance, a.importance + p.k, importance.begin()))
               : std::fill(importance.begin(), importance.begin() + p.k, 1.0f);
  for_each_row(threads, kernels, Source(p.n, p.k, p.weight_dtype, a), [&](int64_t n, const float* values) {
    for (int64_t g = 0; g < p.groups(); ++g) {
      const int64_t first = g * p.group_size, count = std::min(p.group_size, p.k - first);
      const QuantizedGroup group =
          kernels.groups->integers(rules, values + first, importance.data() + first, count, a.q + n * p.k + first);
      store(a.scales, n * p.groups() + g, p.scale_dtype, group.scale);
      store(a.zeros, n * p.groups() + g, p.scale_dtype, group.zero);
      squares[n].error += group.error, squares[n].norm += group.norm;
    }
  });
  add_up(squares, a.squares);
  return {};
}

Status quantize_weight_fp8(const BlockProblem& p, const WeightArguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const QuantizeKernels& kernels = quantize_kernels(features);
  const Source source(p.n, p.k, p.weight_dtype, a);
  const int64_t across = p.block_columns();
  // Calls task(block column, its first column, its number of columns).
  const auto blocks = [&](const auto& task) {
    for (int64_t b = 0; b < across; ++b) task(b, b * p.columns, std::min(p.columns, p.k - b * p.columns));
  };
  std::vector<float> largest(static_cast<size_t>(p.n * across));  // of each row
  for_each_row(threads, kernels, source, [&](int64_t n, const float* values) {
    blocks([&](int64_t b, int64_t first, int64_t count) {
      largest[n * across + b] = largest_magnitude(kernels, values + first, count);
    });
  });
  float* scales = static_cast<float*>(a.scales);
  std::fill(scales, scales + p.block_rows() * across, std::numeric_limits<float>::min());
  for (int64_t n = 0; n < p.n; ++n) {
    for (int64_t b = 0; b < across; ++b) {
      float& scale = scales[n / p.rows * across + b];
      scale = std::max(scale, largest[n * across + b] / kLargestFp8);
    }
  }
  float decoded[256];
  for (int code = 0; code < 256; ++code) decoded[code] = from_fp8(static_cast<uint8_t>(code));
  std::vector<Squares> squares(static_cast<size_t>(p.n));
  for_each_row(threads, kernels, source, [&](int64_t n, float* values) {
    uint8_t* q = a.q + n * p.k;
    blocks([&](int64_t b, int64_t first, int64_t count) {
      const float scale = scales[n / p.rows * across + b];
      float* block = values + first;
      Squares sums;
      for (int64_t i = 0; i < count; ++i) sums.norm += block[i] * block[i];
      // A quotient, as on the GPU: rounding of the reciprocal would move values near the midpoint between two codes.
      for (int64_t i = 0; i < count; ++i) block[i] /= scale;
      kernels.to_fp8({block}, count, 1, q + first);
      for (int64_t i = 0; i < count; ++i) {
        const float difference = (decoded[q[first + i]] - block[i]) * scale;
        sums.error += difference * difference;
      }
      squares[n].error += sums.error, squares[n].norm += sums.norm;
    });
  });
  add_up(squares, a.squares);
  return {};
}

Status quantize_weight_fp4(const Fp4Problem& p, const WeightArguments& a, const Threads& threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const QuantizeKernels& kernels = quantize_kernels(features);
  const Source source(p.n, p.k, p.weight_dtype, a);
  Fp4Rules rules;
  rules.is_nvfp4 = p.is_nvfp4;
  if (p.is_nvfp4) {
    std::vector<float> largest(static_cast<size_t>(p.n));
    for_each_row(threads, kernels, source,
                 [&](int64_t n, const float* values) { largest[n] = largest_magnitude(kernels, values, p.k); });
    // 1 if all values are 0 or one is NaN.
    const float divisor = 1 / *std::max_element(largest.begin(), largest.end()) * (kLargestFp4 * kLargestFp8);
    if (divisor > 0 && divisor <= std::numeric_limits<float>::max()) {
      rules.divisor = std::clamp(divisor, kSmallestDivisor, kLargestDivisor);
    }
  }
  *static_cast<float*>(a.zeros) = rules.divisor;
  std::vector<Squares> squares(static_cast<size_t>(p.n));
  for_each_row(threads, kernels, source, [&](int64_t n, const float* values) {
    for (int64_t g = 0; g < p.groups(); ++g) {
      const int64_t first = g * p.group_size(), count = std::min(p.group_size(), p.k - first);
      const QuantizedGroup group = kernels.groups->fp4(rules, values + first, count, a.q + n * p.k + first);
      store(a.scales, n * p.groups() + g, DType::kBFloat16, group.scale);
      squares[n].error += group.error, squares[n].norm += group.norm;
    }
  });
  add_up(squares, a.squares);
  return {};
}

Status largest_magnitude(const BlockProblem& p, const WeightArguments& a, const Threads& threads, float* largest) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const QuantizeKernels& kernels = quantize_kernels(features);
  std::vector<QuantizeRange> ranges(static_cast<size_t>(p.n));
  for_each_row(threads, kernels, Source(p.n, p.k, p.weight_dtype, a),
               [&](int64_t n, const float* values) { ranges[n] = kernels.range({values}, p.k); });
  *largest = 0;
  for (const QuantizeRange& range : ranges) {
    if (!range.finite) *largest = std::numeric_limits<float>::quiet_NaN();
    if (*largest < std::max(-range.low, range.high)) *largest = std::max(-range.low, range.high);
  }
  return {};
}

}  // namespace qao::cpu
