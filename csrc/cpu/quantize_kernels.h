// The loops of quantize.cpp and quantize_weight.cpp, which each instruction set has of its own. Files compiled for one
// of them include this header, so it declares and never defines (mm_job.h says why); they read the fields of Problem
// and call none of its functions.
#pragma once

#include <cstdint>

#include "qao/quantize.h"
#include "qao/quantize_groups.h"

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

using GroupRules = groups::Rules;
using Fp4Rules = groups::Fp4Rules;
using QuantizedGroup = groups::Group;

// A group of a weight; each instruction set has a file for these.
struct GroupKernels {
  // groups::quantize_group()
  QuantizedGroup (*integers)(const GroupRules&, const float* values, const float* importance, int64_t count,
                             uint8_t* q);
  // groups::quantize_fp4_group()
  QuantizedGroup (*fp4)(const Fp4Rules&, const float* values, int64_t count, uint8_t* q);
};

struct QuantizeKernels {
  // Row m of the values, values[0 .. k), in float32; and row m of Arguments::sum, if there is one.
  void (*values)(const quantize::Problem&, const quantize::Arguments&, int64_t m, float* values);
  // Of kHadamard what remains to be done with them: each run of `rotation` values times the matrix.
  void (*rotate)(float* values, int64_t count, int rotation);
  QuantizeRange (*range)(Floats values, int64_t count);
  // q = min(max(round(value * inverse) + zero, lowest), 127), zero and lowest integers
  void (*to_int8)(Floats values, int64_t count, float inverse, int zero, int lowest, int8_t* q);
  void (*to_fp8)(Floats values, int64_t count, float inverse, uint8_t* q);
  // y[index .. index + count) = values
  void (*to_float)(const float* values, int64_t count, void* y, int64_t index, DType y_dtype);
  const GroupKernels* groups;
};

namespace scalar {
extern const QuantizeKernels kQuantize;
extern const GroupKernels kGroups;
}  // namespace scalar
namespace avx2 {
extern const QuantizeKernels kQuantize;
extern const GroupKernels kGroups;
}  // namespace avx2
namespace avx512 {
extern const QuantizeKernels kQuantize;
extern const GroupKernels kGroups;
}  // namespace avx512
namespace neon {
extern const QuantizeKernels kQuantize;
extern const GroupKernels kGroups;
}  // namespace neon

}  // namespace qao::cpu
