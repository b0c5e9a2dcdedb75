// Quantization code common to all instruction sets, such as scales and zero points.
// The loops over a row are QuantizeKernels.
#include "cpu/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cpu/numeric.h"
#include "cpu/quantize_kernels.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

using quantize::Arguments;
using quantize::Problem;

constexpr float kSmallestMaximum = 0x1p-100f;  // below it, the reciprocal of a scale would overflow
constexpr float kLargestFp8 = 448;

constexpr struct {
  Features needs;
  const QuantizeKernels* kernels;
} kTable[] = {
#if defined(__x86_64__)
    {kAvx512, &avx512::kQuantize},
    {kAvx2, &avx2::kQuantize},
#elif defined(__aarch64__)
    {kNeon, &neon::kQuantize},
#endif
    {kScalar, &scalar::kQuantize},
};

void include(QuantizeRange* range, const QuantizeRange& other) {
  range->low = std::min(range->low, other.low), range->high = std::max(range->high, other.high);
  range->finite = range->finite && other.finite;
}

float scale_of(const Problem& p, const QuantizeRange& range) {
  if (!range.finite) return std::numeric_limits<float>::quiet_NaN();
  const float largest = std::max({-range.low, range.high, kSmallestMaximum});
  if (p.format == Format::kFp8) return largest / kLargestFp8;
  if (p.symmetric) return largest / 127;
  return std::max(range.high / 255 - range.low / 255, kSmallestMaximum);
}

Floats from(Floats values, int64_t first) {
  return {static_cast<const char*>(values.data) + first * size_of(values.dtype), values.dtype};
}

void quantize_int8(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t m, Floats values) {
  const QuantizeRange range = kernels.range(values, p.k);
  const float scale = scale_of(p, range), inverse = 1 / scale;
  int zero = 0;
  if (!p.symmetric && range.finite) {
    zero = static_cast<int>(std::clamp(std::nearbyint(-128 - range.low * inverse), -128.0f, 127.0f));
  }
  int8_t* q = static_cast<int8_t*>(a.q) + m * a.q_stride;
  if (range.finite) {
    kernels.to_int8(values, p.k, inverse, zero, p.symmetric ? -127 : -128, q);
  } else {
    std::memset(q, 0, static_cast<size_t>(p.k));
  }
  a.scales[m] = scale;
  if (a.zeros != nullptr) a.zeros[m] = zero;
}

void quantize_fp8(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t m, Floats values) {
  uint8_t* q = static_cast<uint8_t*>(a.q) + m * a.q_stride;
  const int64_t length = p.scaling == Scaling::kBlock ? kScaleBlock : p.k;
  for (int64_t first = 0; first < p.k; first += length) {
    const int64_t count = std::min(length, p.k - first);
    const Floats part = from(values, first);
    float scale;
    if (p.scaling == Scaling::kTensor) {
      scale = a.scales[0];
    } else {
      scale = scale_of(p, kernels.range(part, count));
      a.scales[p.scaling == Scaling::kRow ? m : m * p.blocks() + first / kScaleBlock] = scale;
    }
    if (a.q == nullptr) continue;
    if (std::isnan(scale)) {
      std::memset(q + first, 0, static_cast<size_t>(count));
    } else {
      kernels.to_fp8(part, count, 1 / scale, q + first);
    }
  }
}

void quantize_row(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t m, Floats values) {
  p.format == Format::kInt8 ? quantize_int8(p, a, kernels, m, values) : quantize_fp8(p, a, kernels, m, values);
  if (a.q == nullptr) return;
  std::memset(static_cast<char*>(a.q) + m * a.q_stride + p.k, 0, static_cast<size_t>(a.q_stride - p.k));
}

// kSwiglu is kSiluMul of its halves as they are, or of alpha g and (u + shift) / alpha, which `parts` [2 k] holds.
void gated_values(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t m, float* parts,
                  float* values) {
  const quantize::Gate& gate = p.gate;
  Problem silu_mul;
  silu_mul.m = p.m, silu_mul.k = p.k;
  silu_mul.x_dtype = p.x_dtype;
  silu_mul.producer = quantize::Producer::kSiluMul;
  if (gate.is_silu_mul()) {
    Arguments halves;
    halves.x = a.x, halves.up = from({a.x, p.x_dtype}, p.k).data;
    halves.x_stride = halves.up_stride = a.x_stride;
    return kernels.values(silu_mul, halves, m, values);
  }
  const int64_t step = gate.interleaved ? 2 : 1, first = m * a.x_stride, second = first + (gate.interleaved ? 1 : p.k);
  for (int64_t k = 0; k < p.k; ++k) {
    const float g = load(a.x, first + step * k, p.x_dtype), u = load(a.x, second + step * k, p.x_dtype);
    parts[k] = gate.alpha * (g > gate.limit ? gate.limit : g);  // NaN stays
    parts[p.k + k] = ((u > gate.limit ? gate.limit : u < -gate.limit ? -gate.limit : u) + gate.shift) / gate.alpha;
  }
  silu_mul.x_dtype = DType::kFloat32;
  Arguments row;
  row.x = parts, row.up = parts + p.k;
  kernels.values(silu_mul, row, 0, values);
}

// Per-thread memory for a producer's row.
float* row_memory(const Problem& p) {
  const int64_t parts = p.producer == quantize::Producer::kNone ? 0 : p.producer == quantize::Producer::kSwiglu ? 3 : 1;
  return static_cast<float*>(scratch(Scratch::kRow, parts * p.k * static_cast<int64_t>(sizeof(float))));
}

// The row to be rounded: x itself, or the producer's output.
Floats values_of(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t m, float* memory) {
  if (p.producer == quantize::Producer::kNone) return from({a.x, p.x_dtype}, m * a.x_stride);
  if (p.producer == quantize::Producer::kSwiglu) {
    gated_values(p, a, kernels, m, memory + p.k, memory);
  } else {
    kernels.values(p, a, m, memory);
  }
  if (p.producer == quantize::Producer::kHadamard) kernels.rotate(memory, p.k, p.rotation);
  return {memory};
}

}  // namespace

const QuantizeKernels& quantize_kernels(Features features) {
  const auto* row = kTable;
  while (!includes(features, row->needs)) ++row;
  return *row->kernels;
}

Status quantize(const Problem& p, const Arguments& a, const Threads& all_threads) {
  Features features;
  if (Status status = selected_features(&features); !status.ok()) return status;
  const QuantizeKernels& kernels = quantize_kernels(features);
  const Threads threads = is_serial(all_threads, p.m * p.k) ? Threads{} : all_threads;
  // Calls task(thread, m, values) for every row.
  const auto rows = [&](const auto& task) {
    threads.for_each([&](int i) {
      float* memory = row_memory(p);
      for (int64_t m = p.m * i / threads.count; m < p.m * (i + 1) / threads.count; ++m) {
        task(i, m, values_of(p, a, kernels, m, memory));
      }
    });
  };
  if (p.scaling == Scaling::kTensor && !p.static_scale) {
    std::vector<QuantizeRange> parts(static_cast<size_t>(threads.count));
    rows([&](int i, int64_t, Floats values) { include(&parts[i], kernels.range(values, p.k)); });
    QuantizeRange range;
    for (const QuantizeRange& part : parts) include(&range, part);
    a.scales[0] = scale_of(p, range);
  }
  if (p.format == Format::kFloat) {
    split(threads, p.m, [&](int64_t begin, int64_t end) { write_values(p, a, kernels, begin, end); });
    return {};
  }
  rows([&](int, int64_t m, Floats values) { quantize_row(p, a, kernels, m, values); });
  return {};
}

void quantize_rows(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t begin, int64_t end) {
  float* memory = row_memory(p);
  for (int64_t m = begin; m < end; ++m) quantize_row(p, a, kernels, m, values_of(p, a, kernels, m, memory));
}

void write_values(const Problem& p, const Arguments& a, const QuantizeKernels& kernels, int64_t begin, int64_t end) {
  float* values = row_memory(p);
  for (int64_t m = begin; m < end; ++m) {
    values_of(p, a, kernels, m, values);
    if (a.row_scale != nullptr) {
      const float factor = load(a.row_scale, m, a.row_scale_dtype);
      for (int64_t k = 0; k < p.k; ++k) values[k] *= factor;
    }
    kernels.to_float(values, p.k, a.y, m * p.k, p.x_dtype);
  }
}

}  // namespace qao::cpu
