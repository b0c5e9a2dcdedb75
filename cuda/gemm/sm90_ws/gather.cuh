// Gather of the rows of x, and of their scales, zero points and sums, into the order of y.
#pragma once

#include "common/ptx.cuh"
#include "gemm/moe_routing.cuh"

namespace qao::gemm::sm90_ws {

// Rows of `units` elements of 16, 4 or 2 bytes.
struct RowCopy {
  const uint8_t* from;
  uint8_t* to;                     // null: no copy
  int64_t from_stride, to_stride;  // bytes
  int units, unit_bytes;
};
struct RowCopies {
  RowCopy of[4];
};

template <typename Unit>
__device__ __forceinline__ void copy_row(const RowCopy& copy, int64_t from, int64_t to) {
  const Unit* source = reinterpret_cast<const Unit*>(copy.from + from * copy.from_stride);
  Unit* target = reinterpret_cast<Unit*>(copy.to + to * copy.to_stride);
  for (int i = threadIdx.x % 32; i < copy.units; i += 32) target[i] = source[i];
}

constexpr int kGatherThreads = 256, kGatherRows = kGatherThreads / 32;

// One warp per row.
__global__ void __launch_bounds__(kGatherThreads)
    sm90_ws_gather_rows(const __grid_constant__ Routing r, const __grid_constant__ RowCopies copies) {
  ptx::wait_then_launch_dependents();
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kGatherRows + threadIdx.x / 32;
  if (row >= r.rows) return;
  const int64_t from = x_row(r, row);
#pragma unroll
  for (const RowCopy& copy : copies.of) {
    if (copy.to == nullptr) continue;
    if (copy.unit_bytes == 16) {
      copy_row<uint4>(copy, from, row);
    } else if (copy.unit_bytes == 4) {
      copy_row<uint32_t>(copy, from, row);
    } else {
      copy_row<uint16_t>(copy, from, row);
    }
  }
}

}  // namespace qao::gemm::sm90_ws
