// Epilogue of int8 kernels: from integer sums to y, 16 columns at a time. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {

// Columns n .. n + 16 of y, and their bias.
struct Columns {
  int64_t n;
  __mmask16 mask;
  __m512 bias;
};
static inline Columns load_columns(const Job& job, int64_t n) {
  const __mmask16 mask = first(job.n - n);
  return {n, mask, job.bias != nullptr ? load16(job.bias, n, job.bias_dtype, mask) : _mm512_setzero_ps()};
}

// W's scales, per row or per tensor.
static inline __m512 load_scales(const Job& job, int64_t n) {
  if (job.weight_scaling == Scaling::kRow) return load16(job.scales, n, DType::kFloat32, first(job.n - n));
  return _mm512_set1_ps(*static_cast<const float*>(job.scales));
}

// Factors of x's zero points: sums of W's integers over k, exact below 2^22.
static inline __m512i sums_of_integers(const Job& job, int64_t n, __m512 scales) {
  if (job.x_zeros == nullptr) return _mm512_setzero_si512();
  return _mm512_cvtps_epi32(_mm512_div_ps(load16(job.weight_sums, n, DType::kFloat32, first(job.n - n)), scales));
}

// Sums of x's integers times W's over k, minus the contribution of x's zero point, as integers: both may be thousands
// of times larger than the difference.
static inline __m512i less_zero(const Job& job, int64_t m, __m512i sum, __m512i w_sums) {
  if (job.x_zeros == nullptr) return sum;
  return _mm512_sub_epi32(sum, _mm512_mullo_epi32(_mm512_set1_epi32(job.x_zeros[m]), w_sums));
}

// y[m] from the scaled sums of x's integers times W over k.
static inline __m512 value_of_y(const Job& job, const Columns& columns, int64_t m, __m512 sum) {
  return _mm512_fmadd_ps(_mm512_set1_ps(job.x_scales[m]), sum, columns.bias);
}
static inline void write_row(const Job& job, const Columns& columns, int64_t m, __m512 sum) {
  store16(job.y, m * job.n + columns.n, job.y_dtype, value_of_y(job, columns, m, sum), columns.mask);
}

}  // namespace qao::cpu
