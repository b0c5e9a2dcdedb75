// Exact conversion of e4m3 x to bfloat16; other dtypes as in avx2.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/avx512/expand.h"

namespace qao::cpu {

void avx512::widen_fp8(const Job& job, void* out, int64_t begin, int64_t end) {
  if (job.x_dtype != DType::kBFloat16) return avx2::widen_fp8(job, out, begin, end);
  for (int64_t m = begin; m < end; ++m) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride;
    uint16_t* to = static_cast<uint16_t*>(out) + m * job.tiles_k * kTileColumns;
    for (int64_t k = 0; k < job.k; k += kTileColumns, to += kTileColumns) {
      const __mmask64 inside = job.k - k >= kTileColumns ? ~__mmask64{0} : (__mmask64{1} << (job.k - k)) - 1;
      __m512i values[2];
      expand_fp8(_mm512_maskz_loadu_epi8(inside, x + k), values);
      _mm512_storeu_si512(to, values[0]);
      _mm512_storeu_si512(to + kTileColumns / 2, values[1]);
    }
  }
}

}  // namespace qao::cpu
