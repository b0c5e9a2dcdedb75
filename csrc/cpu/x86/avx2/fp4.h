// fp4 W with AVX2: values of codes, scales of eight rows (cuda/layout/fp4.h). `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx2/simd.h"
#include "layout/fp4.h"

namespace qao::cpu {

// Values of codes in 32-bit words.
static inline __m256 fp4_value(__m256i codes) {
  const __m256 magnitude = _mm256_permutevar8x32_ps(_mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6), codes);
  const __m256i sign = _mm256_slli_epi32(_mm256_srli_epi32(codes, 3), 31);
  return _mm256_or_ps(magnitude, _mm256_castsi256_ps(sign));
}

// Scales of rows 8 v .. 8 v + 7 of an N-tile.
static inline __m256 load_fp4_scales(const Job& job, int64_t tile_n, int64_t row, int v) {
  return load8(job.scales, (tile_n * job.scale_rows + row) * int4::kTileN + 8 * v, DType::kBFloat16);
}

// Factors of eight rows of W for their sums of codes times scales.
static inline __m256 fp4_row_factors(const Job& job, int64_t tile_n, int v) {
  if (job.scale_rows == job.groups) return _mm256_set1_ps(1);
  const __m256 upper =
      _mm256_add_ps(load_fp4_scales(job, tile_n, job.groups, v), load_fp4_scales(job, tile_n, job.groups + 1, v));
  return _mm256_div_ps(_mm256_set1_ps(1), _mm256_add_ps(upper, load_fp4_scales(job, tile_n, job.groups + 2, v)));
}

}  // namespace qao::cpu
