// fp4 W with AVX-512: values and scales of 16 rows (cuda/layout/fp4.h). `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx512/simd.h"
#include "layout/fp4.h"

namespace qao::cpu {

// Value of each code; `vpermps` only uses the lower four bits of an index.
static inline __m512 fp4_values() {
  return _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
}

static inline __m512 load_fp4_scales(const Job& job, int64_t tile_n, int64_t row) {
  return load16(job.scales, (tile_n * job.scale_rows + row) * int4::kTileN, DType::kBFloat16);
}

// Factors of 16 rows of W for their sums of codes times scales.
static inline __m512 fp4_row_factors(const Job& job, int64_t tile_n) {
  if (job.scale_rows == job.groups) return _mm512_set1_ps(1);
  const __m512 upper =
      _mm512_add_ps(load_fp4_scales(job, tile_n, job.groups), load_fp4_scales(job, tile_n, job.groups + 1));
  return _mm512_div_ps(_mm512_set1_ps(1), _mm512_add_ps(upper, load_fp4_scales(job, tile_n, job.groups + 2)));
}

}  // namespace qao::cpu
