// Launch functions of the kernel families, and the x operand that they share.
#pragma once

#include <cstdint>
#include <span>

#include "qao/grouped_mm.h"

namespace qao::mm {

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

namespace stream {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
              const X& x, void* stream);
}  // namespace stream
namespace wgmma {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const Experts& experts, const X& x,
              void* stream);
}  // namespace wgmma
namespace mma_sync {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
namespace float_int4 {
Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream);
}
}  // namespace mma_sync

inline unsigned blocks_of(int64_t threads, int per_block) {
  return static_cast<unsigned>((threads + per_block - 1) / per_block);
}

}  // namespace qao::mm
