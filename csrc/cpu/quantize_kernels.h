// The loops of quantize.cpp and quantize_weight.cpp, which each instruction set has of its own. Files compiled for one
// of them include this header, so it declares and never defines (mm_job.h says why); they read the fields of Problem
// and call none of its functions.
#pragma once

#include <cstdint>

#include "qao/quantize.h"

namespace qao::cpu {

// Floats side by side.
struct Floats {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

struct QuantizeRange {
  float low = 0, high = 0;  // of some values and 0
  bool finite = true;       // else the other two mean nothing
};

// The whole numbers a value of a weight may become; `middle` is the zero point of a symmetric weight.
struct Codes {
  float lowest = 0, highest = 0, middle = 0;
};

struct GroupRules {
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

struct QuantizedGroup {
  float scale = 0, zero = 0;
  float error = 0, norm = 0;  // squares: of the values less what they became, and of the values
};

struct QuantizeKernels {
  // Row m of the values, values[0 .. k), in float32; and row m of Arguments::sum, if there is one.
  void (*values)(const quantize::Problem&, const quantize::Arguments&, int64_t m, float* values);
  QuantizeRange (*range)(Floats values, int64_t count);
  // q = min(max(round(value * inverse) + zero, lowest), 127), zero and lowest integers
  void (*to_int8)(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q);
  void (*to_fp8)(Floats values, int64_t count, float inverse, uint8_t* q);
  // y[index .. index + count) = values
  void (*to_float)(const float* values, int64_t count, void* y, int64_t index, DType y_dtype);
  // A group of a weight: values[0 .. count), which zeros follow up to a multiple of 16, of no importance. Of the
  // factors it takes the first of the least sum of squared errors times importance, which is as long and >= 0. Unless
  // symmetric or with whole zero points, values that lie on a grid of sixteen steps already keep it, and others get
  // scale and zero point by least squares from there, in `rounds` at most.
  QuantizedGroup (*group)(const GroupRules&, const float* values, const float* importance, int64_t count, uint8_t* q);
};

namespace scalar {
extern const QuantizeKernels kQuantize;
QuantizedGroup quantize_group(const GroupRules&, const float* values, const float* importance, int64_t count,
                              uint8_t* q);
}  // namespace scalar
namespace avx2 {
extern const QuantizeKernels kQuantize;
QuantizedGroup quantize_group(const GroupRules&, const float* values, const float* importance, int64_t count,
                              uint8_t* q);
}  // namespace avx2
namespace avx512 {
extern const QuantizeKernels kQuantize;
QuantizedGroup quantize_group(const GroupRules&, const float* values, const float* importance, int64_t count,
                              uint8_t* q);
}  // namespace avx512
namespace neon {
extern const QuantizeKernels kQuantize;
QuantizedGroup quantize_group(const GroupRules&, const float* values, const float* importance, int64_t count,
                              uint8_t* q);
}  // namespace neon

}  // namespace qao::cpu
