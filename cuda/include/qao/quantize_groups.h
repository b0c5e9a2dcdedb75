// Group-wise integer quantization of weights [N, K] with a search for clipping ranges. C++ API.
//
// For CPU and GPU. csrc/ops/quantize_weight.cpp is the only caller. The arithmetic is in quantize_group.h.
#pragma once

#include <cstdint>
#include <limits>

#include "qao/status.h"
#include "qao/types.h"

namespace qao::groups {

struct Problem {
  int64_t n = 0, k = 0;
  DType weight_dtype = DType::kFloat32;
  Format format = Format::kInt4;  // 0..15 in a uint8; kInt8: -127..127
  int64_t group_size = 0;         // columns per scale: a multiple of 16, or k
  bool symmetric = true;          // zero points are 8 (int4) or 0 (int8)
  DType scale_dtype = DType::kFloat32;
  const float* factors = nullptr;  // candidate multiples of a group's range; ties go to the first
  int64_t factor_count = 0;
  bool whole_zeros = false;  // integer zero points only
  int64_t rounds = 0;        // iterations of least squares for scale and float zero point

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct Arguments {
  const void* weight = nullptr;       // [n, k] of weight_dtype, unit stride along k
  int64_t weight_stride = 0;          // elements
  const float* importance = nullptr;  // [k], weights of the squared error per column; null: 1
  uint8_t* q = nullptr;               // [n, k]
  void* scales = nullptr;             // [n, groups] of scale_dtype
  void* zeros = nullptr;              // [n, groups] of scale_dtype
  double* squares = nullptr;    // [2]: sums of squared errors and of squared weights; not finite if a value is not
  double* workspace = nullptr;  // workspace_doubles(problem), GPU only
};

// Range of the integer codes; `middle` is the zero point of a symmetric weight.
struct Codes {
  float lowest = 0, highest = 0, middle = 0;
};

// Parameters of a Problem for one group.
struct Rules {
  Codes codes;
  bool symmetric = true;
  DType scale_dtype = DType::kFloat32;
  float smallest = 0;              // least magnitude of a scale
  int64_t size = 0;                // columns of a full group
  const float* factors = nullptr;  // candidate multiples of the group's range
  int64_t factor_count = 0;
  bool whole_zeros = false;  // integer zero points; else asymmetric groups may have float zero points
  int64_t rounds = 0;        // iterations of least squares for scale and zero point
};

inline Rules rules_of(const Problem& p) {
  Rules rules;
  rules.codes = p.format == Format::kInt4 ? Codes{0, 15, 8} : Codes{-127, 127, 0};
  rules.symmetric = p.symmetric;
  rules.scale_dtype = p.scale_dtype;
  // Groups of zeros also need a divisor: the least value of the dtype that is normal in float32.
  rules.smallest = p.scale_dtype == DType::kFloat16 ? 0x1p-24f : std::numeric_limits<float>::min();
  rules.size = p.group_size;
  rules.factors = p.factors, rules.factor_count = p.factor_count;
  rules.whole_zeros = p.whole_zeros, rules.rounds = p.rounds;
  return rules;
}

// The same for fp4 (quantize_fp4_group.h).
struct Fp4Rules {
  bool is_nvfp4 = false;  // scales are e4m3 values over the divisor; else powers of two
  float divisor = 1;
};

struct Group {
  float scale = 0, zero = 0;
  float error = 0, norm = 0;  // sums of squared errors and of squared values
};

// ---- GPU only ----

constexpr int kMaxFactors = 64;

int64_t workspace_doubles(const Problem& problem);

// Enqueues on `stream` (a cudaStream_t) of the current device; at most kMaxFactors factors.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::groups
