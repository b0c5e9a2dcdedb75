// What quantize_weight.cpp asks of each instruction set. Files compiled for one ISA include this header, so it declares
// and never defines (int4_kernels.h says why).
#pragma once

#include <cstdint>

#include "qao/types.h"

namespace qao::cpu {

// The whole numbers a value may become; `middle` is the zero point of a symmetric weight.
struct Codes {
  float lowest = 0, highest = 0, middle = 0;
};

struct GroupRules {
  Codes codes;
  bool symmetric = true;
  DType scale_dtype = DType::kFloat32;
  float smallest = 0;              // magnitude of a scale
  const float* factors = nullptr;  // multiples of the group's range that are tried
  int64_t factor_count = 0;
};

struct QuantizedGroup {
  float scale = 0, zero = 0;
  float error = 0, norm = 0;  // squares: of the values less what they became, and of the values
};

// Quantises values[0 .. count), which zeros follow up to a multiple of 16: they are exact under every scale.
using QuantizeGroup = QuantizedGroup (*)(const GroupRules&, const float* values, int64_t count, uint8_t* q);
QuantizedGroup quantize_group_scalar(const GroupRules&, const float* values, int64_t count, uint8_t* q);
QuantizedGroup quantize_group_avx2(const GroupRules&, const float* values, int64_t count, uint8_t* q);
QuantizedGroup quantize_group_avx512(const GroupRules&, const float* values, int64_t count, uint8_t* q);

}  // namespace qao::cpu
