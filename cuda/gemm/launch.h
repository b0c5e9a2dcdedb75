// Launch functions of the kernel families, and the x operand that they share.
#pragma once

#include <cstdint>
#include <span>

#include "qao/grouped_gemm.h"

namespace qao::gemm {

// x in the format that the kernel reads: 8 or 16 bits, a float32 x split into bfloat16 parts side by side, or floats
// that the kernel quantizes itself.
struct X {
  const void* data;
  int64_t stride;  // elements
  int parts;
  int64_t part_stride;  // elements
  bool aligned;         // base address and row stride are multiples of 16 bytes
  const float* sums;    // [m, groups], or null
};

namespace sm90_skinny {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              const X& x, void* stream);
}  // namespace sm90_skinny
namespace sm90_ws {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);
}  // namespace sm90_ws
namespace sm80_mma {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
namespace weight_only {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
}
}  // namespace sm80_mma

inline unsigned blocks_of(int64_t threads, int per_block) {
  return static_cast<unsigned>((threads + per_block - 1) / per_block);
}

}  // namespace qao::gemm
