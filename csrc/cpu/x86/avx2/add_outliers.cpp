// Products of the outliers of x, which its fixed point leaves out (pack_fixed_point.cpp).
// They are computed in float32, column by column of W. y is rounded to its dtype afterwards.
#include "cpu/fixed_point.h"
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/x86/avx2/fp4.h"
#include "cpu/x86/avx2/simd.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

// A column of W in one N-tile: rows 0..7 and 8..15.
struct Column {
  __m256 rows[2];
};
Column load_column(const Job& job, int64_t tile, int64_t k) {
  const uint8_t* at =
      job.weight + (tile * job.tiles_k + k / kTileK) * kTileBytes + int4::tile_byte(0, static_cast<int>(k % kTileK));
  __m128i bytes = _mm_setzero_si128();
  bytes = _mm_insert_epi8(bytes, at[0 * kTileK], 0);
  bytes = _mm_insert_epi8(bytes, at[1 * kTileK], 1);
  bytes = _mm_insert_epi8(bytes, at[2 * kTileK], 2);
  bytes = _mm_insert_epi8(bytes, at[3 * kTileK], 3);
  bytes = _mm_insert_epi8(bytes, at[4 * kTileK], 4);
  bytes = _mm_insert_epi8(bytes, at[5 * kTileK], 5);
  bytes = _mm_insert_epi8(bytes, at[6 * kTileK], 6);
  bytes = _mm_insert_epi8(bytes, at[7 * kTileK], 7);
  const __m256i both = _mm256_cvtepu8_epi32(bytes);
  const __m256i q[2] = {_mm256_and_si256(both, _mm256_set1_epi32(15)), _mm256_srli_epi32(both, 4)};
  Column column;
  if (job.weight_format == Format::kFp4) {
    for (int v = 0; v < 2; ++v) {
      const __m256 scale =
          _mm256_mul_ps(load_fp4_scales(job, tile, k / job.group_size, v), fp4_row_factors(job, tile, v));
      column.rows[v] = _mm256_mul_ps(fp4_value(q[v]), scale);
    }
    return column;
  }
  const int64_t group = k / job.section / job.sections_per_group;
  const int64_t offset = (tile * job.groups + group) * job.parameters * kTileN;
  for (int v = 0; v < 2; ++v) {
    const __m256 zero = job.parameters == 2 ? load8(job.scales, offset + kTileN + 8 * v, job.scale_dtype)
                                            : _mm256_set1_ps(int4::kSymmetricZero);
    column.rows[v] = _mm256_mul_ps(_mm256_sub_ps(_mm256_cvtepi32_ps(q[v]), zero),
                                   load8(job.scales, offset + 8 * v, job.scale_dtype));
  }
  return column;
}

}  // namespace

void avx2::add_outliers(const Job& job, const Outliers& outliers, void* y, DType y_dtype, int64_t begin, int64_t end) {
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t m = 0; m < job.m; ++m) {
      __m256 sums[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
      for (int64_t i = outliers.first[m]; i < outliers.first[m + 1];) {
        const int64_t end = least(i + kOutliersAtOnce, outliers.first[m + 1]);
        __m256 some[2] = {_mm256_setzero_ps(), _mm256_setzero_ps()};
        for (; i < end; ++i) {
          const Column column = load_column(job, tile, outliers.columns[i]);
          const __m256 x = _mm256_broadcast_ss(outliers.values + i);
          for (int v = 0; v < 2; ++v) some[v] = _mm256_fmadd_ps(column.rows[v], x, some[v]);
        }
        for (int v = 0; v < 2; ++v) sums[v] = _mm256_add_ps(sums[v], some[v]);
      }
      const __m256 x_scale = _mm256_broadcast_ss(job.x_scales + m * job.x_scale_stride);
      for (int v = 0; v < 2; ++v) {
        const int64_t n = tile * kTileN + 8 * v, count = job.n - n;
        if (count <= 0) break;
        __m256 sum = load_first(job.y, m * job.n + n, DType::kFloat32, count);
        if (outliers.first[m] < outliers.first[m + 1]) sum = _mm256_fmadd_ps(sums[v], x_scale, sum);
        store_first(y, m * job.n + n, y_dtype, sum, count);
      }
    }
  }
}

}  // namespace qao::cpu
