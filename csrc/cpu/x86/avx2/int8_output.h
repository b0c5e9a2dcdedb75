// Epilogue of int8 kernels: from integer sums to y, 8 columns at a time. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {

// Columns n .. n + count of y, and their bias.
struct Columns {
  int64_t n, count;
  __m256 bias;
};
static inline Columns load_columns(const Job& job, int64_t n) {
  const int64_t count = job.n - n < 8 ? job.n - n : 8;
  return {n, count, job.bias != nullptr ? load_first(job.bias, n, job.bias_dtype, count) : _mm256_setzero_ps()};
}

// W's scales, per row or per tensor.
static inline __m256 load_scales(const Job& job, int64_t n) {
  if (job.weight_scaling == Scaling::kRow) return load_first(job.scales, n, DType::kFloat32, job.n - n);
  return _mm256_set1_ps(*static_cast<const float*>(job.scales));
}

// Factors of x's zero points: sums of W's integers over k, exact below 2^22.
static inline __m256i sums_of_integers(const Job& job, int64_t n, __m256 scales) {
  if (job.x_zeros == nullptr) return _mm256_setzero_si256();
  return _mm256_cvtps_epi32(_mm256_div_ps(load_first(job.weight_sums, n, DType::kFloat32, job.n - n), scales));
}

// Sums of x's integers times W's over k, minus the contribution of x's zero point, as integers: both may be thousands
// of times larger than the difference.
static inline __m256i less_zero(const Job& job, int64_t m, __m256i sum, __m256i w_sums) {
  if (job.x_zeros == nullptr) return sum;
  return _mm256_sub_epi32(sum, _mm256_mullo_epi32(_mm256_set1_epi32(job.x_zeros[m]), w_sums));
}

// Writes y[m] from the scaled sums of x's integers times W over k.
static inline void write_row(const Job& job, const Columns& columns, int64_t m, __m256 sum) {
  const __m256 y = _mm256_fmadd_ps(_mm256_set1_ps(job.x_scales[m]), sum, columns.bias);
  store_first(job.y, m * job.n + columns.n, job.y_dtype, y, columns.count);
}

}  // namespace qao::cpu
