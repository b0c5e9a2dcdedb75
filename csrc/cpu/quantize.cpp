#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/numeric.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

constexpr float kSmallestMaximum = 0x1p-100f;  // below, a scale's reciprocal would overflow
constexpr float kLargestFp8 = 448;

struct Range {
  float low = 0, high = 0;
  bool finite = true;

  void add(float value) {
    finite = finite && std::isfinite(value);
    low = std::min(low, value), high = std::max(high, value);
  }
  float largest() const { return std::max({-low, high, kSmallestMaximum}); }
};

// What is quantised, in float32.
void values_of(const Problem& p, const Arguments& a, int64_t m, float* out) {
  double squares = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    out[k] = load(a.x, m * a.x_stride + k, p.x_dtype);
    squares += static_cast<double>(out[k]) * out[k];
  }
  if (p.producer == Producer::kRmsNorm) {
    const float factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(p.k) + p.eps));
    for (int64_t k = 0; k < p.k; ++k) {
      out[k] *= factor;
      if (a.norm_weight != nullptr) out[k] *= load(a.norm_weight, k, p.norm_weight_dtype);
    }
  } else if (p.producer == Producer::kSiluMul) {
    for (int64_t k = 0; k < p.k; ++k) {
      out[k] = out[k] / (1 + std::exp(-out[k])) * load(a.up, m * a.up_stride + k, p.x_dtype);
    }
  }
}

Range range_of(const float* values, int64_t count) {
  Range range;
  for (int64_t k = 0; k < count; ++k) range.add(values[k]);
  return range;
}

float scale_of(const Problem& p, const Range& range) {
  if (!range.finite) return std::numeric_limits<float>::quiet_NaN();
  if (p.format == Format::kFp8) return range.largest() / kLargestFp8;
  if (p.symmetric) return range.largest() / 127;
  return std::max(range.high / 255 - range.low / 255, kSmallestMaximum);
}

void quantize_int8(const Problem& p, const Arguments& a, int64_t m, const float* values) {
  const Range range = range_of(values, p.k);
  const float scale = scale_of(p, range), inverse = 1 / scale;
  float zero = 0;
  if (!p.symmetric && range.finite) zero = std::clamp(std::nearbyint(-128 - range.low * inverse), -128.0f, 127.0f);
  int8_t* q = static_cast<int8_t*>(a.q) + m * a.q_stride;
  for (int64_t k = 0; k < p.k; ++k) {
    const float lowest = p.symmetric ? -127.0f : -128.0f;
    q[k] = range.finite ? static_cast<int8_t>(std::clamp(std::nearbyint(values[k] * inverse) + zero, lowest, 127.0f))
                        : int8_t{0};
  }
  a.scales[m] = scale;
  if (a.zeros != nullptr) a.zeros[m] = static_cast<int32_t>(zero);
}

void quantize_fp8(const Problem& p, const Arguments& a, int64_t m, const float* values) {
  uint8_t* q = static_cast<uint8_t*>(a.q) + m * a.q_stride;
  const int64_t length = p.scaling == Scaling::kBlock ? kScaleBlock : p.k;
  for (int64_t first = 0; first < p.k; first += length) {
    const int64_t count = std::min(length, p.k - first);
    float scale;
    if (p.scaling == Scaling::kTensor) {
      scale = a.scales[0];
    } else {
      scale = scale_of(p, range_of(values + first, count));
      a.scales[p.scaling == Scaling::kRow ? m : m * p.blocks() + first / kScaleBlock] = scale;
    }
    const float inverse = 1 / scale;
    for (int64_t k = first; k < first + count; ++k) q[k] = std::isnan(scale) ? 0 : to_fp8(values[k] * inverse);
  }
}

}  // namespace

Status quantize(const Problem& p, const Arguments& a, const Threads& threads) {
  const auto rows = [&](const auto& task) {
    threads.for_each([&](int i) {
      std::vector<float> values(static_cast<size_t>(p.k));
      for (int64_t m = p.m * i / threads.count; m < p.m * (i + 1) / threads.count; ++m) {
        values_of(p, a, m, values.data());
        task(i, m, values.data());
      }
    });
  };
  if (p.scaling == Scaling::kTensor && !p.static_scale) {
    std::vector<Range> ranges(static_cast<size_t>(threads.count));
    rows([&](int i, int64_t, const float* values) {
      const Range range = range_of(values, p.k);
      ranges[i].finite = ranges[i].finite && range.finite;
      ranges[i].add(range.low), ranges[i].add(range.high);
    });
    Range range;
    for (const Range& part : ranges) {
      range.finite = range.finite && part.finite;
      range.add(part.low), range.add(part.high);
    }
    a.scales[0] = scale_of(p, range);
  }
  rows([&](int, int64_t m, const float* values) {
    p.format == Format::kInt8 ? quantize_int8(p, a, m, values) : quantize_fp8(p, a, m, values);
    std::memset(static_cast<char*>(a.q) + m * a.q_stride + p.k, 0, static_cast<size_t>(a.q_stride - p.k));
  });
  return {};
}

}  // namespace qao::cpu
