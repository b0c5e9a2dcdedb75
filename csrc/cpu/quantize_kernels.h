// Loops of quantize.cpp and quantize_weight.cpp, implemented per instruction set.
// Files compiled for one of them include this header, so it declares and never defines (gemm/job.h explains why). They
// read the fields of Problem and call none of its functions.
#pragma once

#include <cstdint>

#include "qao/quantize.h"
#include "qao/quantize_groups.h"

namespace qao::cpu {

// A contiguous array of floats.
struct Floats {
  const void* data = nullptr;
  DType dtype = DType::kFloat32;
};

struct QuantizeRange {
  float low = 0, high = 0;  // of some values and 0
  bool finite = true;       // otherwise low and high are meaningless
};

using GroupRules = groups::Rules;
using Fp4Rules = groups::Fp4Rules;
using QuantizedGroup = groups::Group;

// Quantization of a group of a weight, one file per instruction set.
struct GroupKernels {
  // groups::quantize_group()
  QuantizedGroup (*integers)(const GroupRules&, const float* values, const float* importance, int64_t count,
                             uint8_t* q);
  // groups::quantize_fp4_group()
  QuantizedGroup (*fp4)(const Fp4Rules&, const float* values, int64_t count, uint8_t* q);
};

struct QuantizeKernels {
  // Computes row m of the values, values[0 .. k), in float32, and row m of Arguments::sum, if any.
  void (*values)(const quantize::Problem&, const quantize::Arguments&, int64_t m, float* values);
  // The last step of kHadamard: multiplies each run of `rotation` values by the matrix.
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
