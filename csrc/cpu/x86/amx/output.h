// Epilogue of the AMX kernels: from C tiles, rows of W by rows of x, to y. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/x86/amx/bf16_pairs.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {

// Scales and zero points of 16 rows of x; 0 past M.
struct RowsOfTile {
  __m512 scale, zero;
};
static inline RowsOfTile load_rows(const Job& job, int64_t m) {
  const __mmask16 mask = first(job.m - m);
  const auto stride = static_cast<int>(job.x_scale_stride);
  const __m512i at = _mm512_mullo_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                        _mm512_set1_epi32(stride));
  const float* scales = job.x_scales + m * job.x_scale_stride;
  RowsOfTile rows = {_mm512_mask_i32gather_ps(_mm512_setzero_ps(), mask, at, scales, 4), _mm512_setzero_ps()};
  if (job.x_zeros != nullptr) rows.zero = _mm512_cvtepi32_ps(_mm512_maskz_loadu_epi32(mask, job.x_zeros + m));
  return rows;
}

// Bias of two N-tiles; 0 past N.
struct ColumnsOfPair {
  alignas(64) float bias[2 * kTileRows];
};
static inline void load_columns(const Job& job, int64_t n, ColumnsOfPair* columns) {
  for (int i = 0; i < 2; ++i) {
    const int64_t at = n + i * kTileRows;
    const __mmask16 mask = first(job.n - at);
    const __m512 bias = job.bias != nullptr ? load16(job.bias, at, job.bias_dtype, mask) : _mm512_setzero_ps();
    _mm512_store_ps(columns->bias + i * kTileRows, bias);
  }
}

// Loads those of all rows, which a kernel reads repeatedly: [2][16 tiles_m], scales and zero points.
static inline void load_all_rows(const Job& job, float* scales, float* zeros) {
  for (int64_t m = 0; m < job.tiles_m * kTileRows; m += kTileRows) {
    const RowsOfTile rows = load_rows(job, m);
    _mm512_store_ps(scales + m, rows.scale), _mm512_store_ps(zeros + m, rows.zero);
  }
}

// Stores bfloat16 y of 16 rows of x from row m on and two N-tiles from column n on, within bounds. words: two adjacent
// rows of W, by rows of x.
__attribute__((always_inline)) static inline void store_pairs(const Job& job, int64_t n, int64_t m,
                                                              __m512i (&words)[kTileRows]) {
  const int64_t count = least(kTileRows, job.m - m), columns = job.n - n;
  transpose16(words);
  const __mmask32 mask = columns >= 2 * kTileRows ? 0xFFFFFFFFu : (1u << columns) - 1;
  uint16_t* to = static_cast<uint16_t*>(job.y) + m * job.n + n;
  for (int64_t i = 0; i < count; ++i) _mm512_mask_storeu_epi16(to + i * job.n, mask, words[i]);
}

// y of row i of a pair of N-tiles. sum: of x's integers minus their zero points times W over k, scaled like W.
__attribute__((always_inline)) static inline __m512 integer_y(__m512 x_scale, const ColumnsOfPair& columns, int i,
                                                              __m512 sum) {
  return _mm512_fmadd_ps(x_scale, sum, _mm512_set1_ps(columns.bias[i]));
}

// Stores y of 16 rows of x from row m on and kN N-tiles from column n on, within bounds. row(i) returns row i of W in
// float32 by rows of x; for kN = 2 it is called for all 32.
template <int kN, typename Row>
__attribute__((always_inline)) static inline void store_tiles(const Job& job, int64_t n, int64_t m, const Row& row) {
  const int64_t count = least(kTileRows, job.m - m), columns = job.n - n;
  if constexpr (kN == 2) {
    // Pairs of adjacent rows of W are words, so one transpose serves both N-tiles.
    if (job.y_dtype == DType::kBFloat16) {
      __m512i words[kTileRows];
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        words[i] = to_bf16_pairs(row(2 * i), row(2 * i + 1));
      }
      return store_pairs(job, n, m, words);
    }
  }
  for (int half = 0; half < kN; ++half) {
    const __mmask16 mask = first(columns - half * kTileRows);
    __m512i words[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) words[i] = _mm512_castps_si512(row(half * kTileRows + i));
    transpose16(words);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t at = (m + i) * job.n + n + half * kTileRows;
      store16(job.y, at, job.y_dtype, _mm512_castsi512_ps(words[i]), mask);
    }
  }
}

// The same for integer sums: sums(i, zero) is row i of the sums; zero: zero points of the rows of x.
template <int kN, typename Sums>
__attribute__((always_inline)) static inline void store_integer_tiles(const Job& job, int64_t n, int64_t m,
                                                                      const ColumnsOfPair& columns, const Sums& sums) {
  const RowsOfTile rows = load_rows(job, m);
  store_tiles<kN>(job, n, m, [&](int i) __attribute__((always_inline)) {
    return integer_y(rows.scale, columns, i, sums(i, rows.zero));
  });
}

}  // namespace qao::cpu
