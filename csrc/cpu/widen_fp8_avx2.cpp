// e4m3 x as bfloat16, exactly.
#include "cpu/expand_avx2.h"
#include "cpu/float_kernels.h"
#include "int4_mm/layout.h"

namespace qao::cpu {

void widen_fp8_avx2(const FloatJob& job, uint16_t* out, int64_t begin, int64_t end) {
  constexpr int kColumns = 16;
  for (int64_t m = begin; m < end; ++m) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride;
    uint16_t* row = out + m * job.tiles_k * int4_mm::kTileK;
    for (int64_t k = 0; k < job.k; k += kColumns) {
      __m128i bytes;
      if (k + kColumns <= job.k) {
        bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + k));
      } else {
        alignas(16) uint8_t padded[kColumns] = {};
        __builtin_memcpy(padded, x + k, static_cast<size_t>(job.k - k));
        bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(padded));
      }
      __m256 values[2];
      expand_fp8(bytes, values);
      for (int i = 0; i < 2; ++i) {
        _mm_store_si128(reinterpret_cast<__m128i*>(row + k) + i, to_bf16(values[i]));
      }
    }
  }
}

}  // namespace qao::cpu
