// Conversion of 8-bit x to bfloat16, in rows of 64 tiles_k values.
// int8 minus its zero point (-128..127) and e4m3 are exact. e4m3 with block scales is scaled and rounded, unless sums
// end with blocks.
#include "cpu/gemm/kernels.h"
#include "cpu/x86/amx/bf16_pairs.h"
#include "cpu/x86/avx512/expand.h"

namespace qao::cpu {
namespace {

// widen(m, k, bytes) converts 32 columns of row m to bfloat16.
template <typename Widen>
__attribute__((always_inline)) inline void widen_rows(const Job& job, void* out, int64_t begin, int64_t end,
                                                      const Widen& widen) {
  constexpr int64_t kColumns = 32;
  for (int64_t m = begin; m < end; ++m) {
    const uint8_t* x = static_cast<const uint8_t*>(job.x) + m * job.x_stride;
    uint16_t* to = static_cast<uint16_t*>(out) + m * job.tiles_k * kTileColumns;
    for (int64_t k = 0; k < job.k; k += kColumns) {
      const int64_t left = job.k - k;
      const __mmask32 inside = left >= kColumns ? 0xFFFFFFFFu : (1u << left) - 1;
      _mm512_storeu_si512(to + k, widen(m, k, _mm256_maskz_loadu_epi8(inside, x + k)));
    }
  }
}

__m512i to_bf16(__m512 first, __m512 second) { return reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)); }

}  // namespace

void amx::widen_int8(const Job& job, void* out, int64_t begin, int64_t end) {
  widen_rows(job, out, begin, end, [&](int64_t m, int64_t, __m256i bytes) {
    const __m512i zero = _mm512_set1_epi32(job.x_zeros != nullptr ? job.x_zeros[m] : 0);
    const auto values = [&](__m128i half) {
      return _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_cvtepi8_epi32(half), zero));
    };
    return to_bf16(values(_mm256_castsi256_si128(bytes)), values(_mm256_extracti128_si256(bytes, 1)));
  });
}

void amx::widen_fp8(const Job& job, void* out, int64_t begin, int64_t end) {
  const bool scaled = job.x_block_stride != 0 && job.bf16_tiles.block_scales == nullptr;
  if (!scaled) return avx512::widen_fp8(job, out, begin, end);
  widen_rows(job, out, begin, end, [&](int64_t m, int64_t k, __m256i bytes) {
    const __m512 scale = _mm512_set1_ps(job.x_scales[m * job.x_scale_stride + k / kScaleBlock]);
    __m512i values[2];
    expand_fp8(_mm512_castsi256_si512(bytes), values);
    return scale_bf16(values[0], scale);
  });
}

}  // namespace qao::cpu
