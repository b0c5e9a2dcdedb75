// What quantize.cpp asks of each instruction set. Files compiled for one ISA include this header, so it declares and
// never defines (int4_kernels.h says why); they read the fields of Problem and call none of its functions.
#pragma once

#include <cstdint>

#include "qao/quantize.h"

namespace qao::cpu {

struct QuantizeRange {
  float low = 0, high = 0;  // of some values and 0
  bool finite = true;       // else the other two mean nothing
};

struct QuantizeKernels {
  // Row m of the values, values[0 .. k), in float32; and row m of Arguments::sum, if there is one.
  void (*values)(const quantize::Problem&, const quantize::Arguments&, int64_t m, float* values);
  QuantizeRange (*range)(const float* values, int64_t count);
  // q = min(max(round(value * inverse) + zero, lowest), 127), zero and lowest integers
  void (*to_int8)(const float* values, int64_t count, float inverse, int zero, int lowest, int8_t* q);
  void (*to_fp8)(const float* values, int64_t count, float inverse, uint8_t* q);
  // y[index .. index + count) = values
  void (*to_float)(const float* values, int64_t count, void* y, int64_t index, DType y_dtype);
};

extern const QuantizeKernels kQuantizeScalar, kQuantizeAvx2, kQuantizeAvx512;

}  // namespace qao::cpu
