// Exact conversion of e4m3 x to a wider dtype.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx2/expand.h"
#include "layout/int4.h"

namespace qao::cpu {

void avx2::widen_fp8(const Job& job, void* out, int64_t begin, int64_t end) {
  constexpr int kColumns = 16;
  for (int64_t m = begin; m < end; ++m) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride;
    const int64_t size = size_of(job.x_dtype);
    char* row = static_cast<char*>(out) + m * job.tiles_k * int4::kTileK * size;
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
        char* to = row + (k + i * 8) * size;
        if (job.x_dtype == DType::kFloat32) {
          _mm256_storeu_ps(reinterpret_cast<float*>(to), values[i]);
        } else {
          const bool half = job.x_dtype == DType::kFloat16;
          _mm_storeu_si128(reinterpret_cast<__m128i*>(to), half ? _mm256_cvtps_ph(values[i], 0) : to_bf16(values[i]));
        }
      }
    }
  }
}

}  // namespace qao::cpu
