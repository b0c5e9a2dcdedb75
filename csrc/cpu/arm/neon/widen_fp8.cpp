// Exact conversion of e4m3 x to a wider dtype.
#include "cpu/arm/simd.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {

void neon::widen_fp8(const Job& job, void* out, int64_t begin, int64_t end) {
  constexpr int kColumns = 8;
  for (int64_t m = begin; m < end; ++m) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride;
    const int64_t row = m * job.tiles_k * kTileColumns;
    for (int64_t k = 0; k < job.k; k += kColumns) {
      uint8_t padded[kColumns] = {};
      __builtin_memcpy(padded, x + k, static_cast<size_t>(job.k - k < kColumns ? job.k - k : kColumns));
      float32x4_t values[2];
      expand_fp8(vld1_u8(padded), values);
      store_first(out, row + k, job.x_dtype, values[0], 4);
      store_first(out, row + k + 4, job.x_dtype, values[1], 4);
    }
  }
}

}  // namespace qao::cpu
