// Scalar quantization of activations, the reference of all instruction sets.
// They match it bit for bit, except for SiLU's exponential.
#include <algorithm>
#include <cmath>

#include "cpu/hadamard.h"
#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;
using quantize::Producer;

void values_of(const Problem& p, const Arguments& a, int64_t m, float* values) {
  double squares = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    float x = load(a.x, m * a.x_stride + k, p.x_dtype);
    if (a.sum != nullptr) {
      if (a.residual != nullptr) x += load(a.residual, m * a.residual_stride + k, p.x_dtype);
      store(a.sum, m * p.k + k, p.x_dtype, x);
      x = load(a.sum, m * p.k + k, p.x_dtype);  // rounded
    }
    values[k] = x;
    if (p.producer == Producer::kRmsNorm) {
      squares += static_cast<double>(x) * x;
      if (a.norm_weight != nullptr) values[k] *= load(a.norm_weight, k, p.norm_weight_dtype);
    } else if (p.producer == Producer::kSiluMul) {
      values[k] = x / (1 + std::exp(-x)) * load(a.up, m * a.up_stride + k, p.x_dtype);
    }
  }
  if (p.producer != Producer::kRmsNorm) return;
  const float factor = static_cast<float>(1 / std::sqrt(squares / static_cast<double>(p.k) + p.eps));
  for (int64_t k = 0; k < p.k; ++k) values[k] *= factor;
}

QuantizeRange range_of(Floats values, int64_t count) {
  QuantizeRange range;
  for (int64_t k = 0; k < count; ++k) {
    const float value = load(values.data, k, values.dtype);
    range.finite = range.finite && std::isfinite(value);
    range.low = std::min(range.low, value), range.high = std::max(range.high, value);
  }
  return range;
}

void round_to_int8(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q) {
  for (int64_t k = 0; k < count; ++k) {
    const int rounded = static_cast<int>(std::nearbyint(load(values.data, k, values.dtype) * inverse)) + zero;
    q[k] = static_cast<int8_t>(std::clamp(rounded, lowest, 127));
  }
}

void round_to_fp8(Floats values, int64_t count, float inverse, uint8_t* q) {
  for (int64_t k = 0; k < count; ++k) q[k] = to_fp8(load(values.data, k, values.dtype) * inverse);
}

void round_to_float(const float* values, int64_t count, void* y, int64_t index, DType y_dtype) {
  for (int64_t k = 0; k < count; ++k) store(y, index + k, y_dtype, values[k]);
}

}  // namespace

const QuantizeKernels scalar::kQuantize = {values_of,    rotate_row<4>,  range_of, round_to_int8,
                                           round_to_fp8, round_to_float, &kGroups};

}  // namespace qao::cpu
