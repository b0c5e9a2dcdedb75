// Float weights [N, K] to integers by groups of columns, with a search for the best clipping range: what is asked of
// CPU and GPU alike. The C++ API; csrc/quantize_weight.cpp is its only caller. The arithmetic is quantize_group.h.
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
  int64_t group_size = 0;         // columns that share a scale: a multiple of 16, or k
  bool symmetric = true;          // zero points are 8 (int4) or 0 (int8)
  DType scale_dtype = DType::kFloat32;
  const float* factors = nullptr;  // multiples of a group's range that are tried, the first of the best is taken
  int64_t factor_count = 0;
  bool whole_zeros = false;  // no zero points but whole numbers
  int64_t rounds = 0;        // of least squares for the scale and a zero point that is none

  int64_t groups() const { return (k + group_size - 1) / group_size; }
};

struct Arguments {
  const void* weight = nullptr;       // [n, k] of weight_dtype, unit stride along k
  int64_t weight_stride = 0;          // elements
  const float* importance = nullptr;  // [k], of the squared error of each column; null: all alike
  uint8_t* q = nullptr;               // [n, k]
  void* scales = nullptr;             // [n, groups] of scale_dtype
  void* zeros = nullptr;              // [n, groups] of scale_dtype
  double* squares = nullptr;    // [2]: sums of squares of the error and of the weight; not finite if a value is not
  double* workspace = nullptr;  // workspace_doubles(problem), on a GPU
};

// The whole numbers a value of a weight may become; `middle` is the zero point of a symmetric weight.
struct Codes {
  float lowest = 0, highest = 0, middle = 0;
};

// A problem as one group sees it.
struct Rules {
  Codes codes;
  bool symmetric = true;
  DType scale_dtype = DType::kFloat32;
  float smallest = 0;              // magnitude of a scale
  int64_t size = 0;                // of a whole group
  const float* factors = nullptr;  // multiples of the group's range that are tried
  int64_t factor_count = 0;
  bool whole_zeros = false;  // zero points are whole numbers; unless symmetric they may be others else
  int64_t rounds = 0;        // of least squares for scale and zero point
};

inline Rules rules_of(const Problem& p) {
  Rules rules;
  rules.codes = p.format == Format::kInt4 ? Codes{0, 15, 8} : Codes{-127, 127, 0};
  rules.symmetric = p.symmetric;
  rules.scale_dtype = p.scale_dtype;
  // Groups of zeros, too, need a scale to divide by: the least of its dtype that is a normal number in float32.
  rules.smallest = p.scale_dtype == DType::kFloat16 ? 0x1p-24f : std::numeric_limits<float>::min();
  rules.size = p.group_size;
  rules.factors = p.factors, rules.factor_count = p.factor_count;
  rules.whole_zeros = p.whole_zeros, rules.rounds = p.rounds;
  return rules;
}

// The same for four-bit floats, quantize_fp4_group.h.
struct Fp4Rules {
  bool is_nvfp4 = false;  // scales are numbers of e4m3 and divided by the divisor; else powers of two
  float divisor = 1;
};

struct Group {
  float scale = 0, zero = 0;
  float error = 0, norm = 0;  // squares: of the values less what they became, and of the values
};

// ---- On a GPU ----

constexpr int kMaxFactors = 64;

int64_t workspace_doubles(const Problem& problem);

// Enqueues on `stream` (a cudaStream_t) of the current device; kMaxFactors at most.
Status launch(const Problem& problem, const Arguments& arguments, void* stream);

}  // namespace qao::groups
