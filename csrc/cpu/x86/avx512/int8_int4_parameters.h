// Scales and zero points of int4 W as the AVX-512 kernels use them: W's bytes `& 0x0F` are row g, `& 0xF0` are 16 times
// row g + 8, and the 1/16 goes into the scale. `static`: see numeric.h.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/x86/avx512/simd.h"
#include "int4_mm/layout.h"

namespace qao::cpu {

struct Int4Parameters {
  alignas(64) float scale[int4_mm::kTileN];  // 1/16 of it for rows 8..15
  alignas(64) float zero[int4_mm::kTileN];   // 16 times it for rows 8..15
};

// Of groups [begin, end) of one N-tile. Not inlined: the loops that use them shall read memory, where a broadcast is
// free, and not permute the registers they came from.
[[gnu::noinline]] static void load_parameters(const Job& job, int64_t tile, int64_t begin, int64_t end,
                                              Int4Parameters* parameters) {
  constexpr __mmask16 kUpperRows = 0xFF00;
  for (int64_t group = begin; group < end; ++group, ++parameters) {
    const int64_t at = (tile * job.groups + group) * job.parameters * int4_mm::kTileN;
    const __m512 scale = load16(job.scales, at, job.scale_dtype);
    const __m512 zero = job.parameters == 2 ? load16(job.scales, at + int4_mm::kTileN, job.scale_dtype)
                                            : _mm512_set1_ps(int4_mm::kSymmetricZero);
    _mm512_store_ps(parameters->scale, _mm512_mask_mul_ps(scale, kUpperRows, scale, _mm512_set1_ps(1.0f / 16)));
    _mm512_store_ps(parameters->zero, _mm512_mask_mul_ps(zero, kUpperRows, zero, _mm512_set1_ps(16)));
  }
}

}  // namespace qao::cpu
