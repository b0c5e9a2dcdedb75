// The x operand of all kernel families, and the launch functions of families.
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

// Splits a float32 x into bfloat16 parts in the workspace, and computes the sums that zero points need.
Status split_x(const Problem& problem, int partials, const Arguments& arguments, void* stream, X* x);

using LaunchFunction = Status(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                              void* stream);
// For a plan of merges().
using LaunchMergedFunction = Status(const Problem& problem, const Plan& plan, const Arguments& arguments,
                                    std::span<const Part> parts, const X& x, void* stream);
using LaunchGroupedFunction = Status(const Problem& problem, const Plan& plan, const Arguments& arguments,
                                     const Experts& experts, const X& x, void* stream);

#define QAO_FAMILY(id, name, space, supports, plan, launch, launch_grouped) \
  namespace space {                                                         \
  LaunchFunction launch;                                                    \
  }
#include "qao/families.inc"
#undef QAO_FAMILY

namespace sm90_skinny {
LaunchGroupedFunction launch_grouped;
LaunchMergedFunction launch_merged;
}  // namespace sm90_skinny
namespace sm90_ws {
LaunchGroupedFunction launch_grouped;
LaunchMergedFunction launch_merged;
}  // namespace sm90_ws
namespace sm80_mma {
LaunchGroupedFunction launch_grouped;
}

inline unsigned blocks_of(int64_t threads, int per_block) {
  return static_cast<unsigned>((threads + per_block - 1) / per_block);
}

}  // namespace qao::gemm
