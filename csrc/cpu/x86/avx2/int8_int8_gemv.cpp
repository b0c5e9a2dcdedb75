// W8A8 kernel for a few rows of x with `vpmaddwd`.
// Lanes run along K: four rows of W by up to two of x, both widened to 16 bits. All products and sums are exact.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/int8_output.h"
#include "cpu/x86/avx2/simd.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kRowsX = 2, kStep = 16;  // kStep: columns at a time

__m256i widen(const void* bytes) { return _mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(bytes))); }

// Sums over the lanes of four registers.
__m128i lane_sums(const __m256i (&a)[kRowsW]) {
  const __m256i four = _mm256_hadd_epi32(_mm256_hadd_epi32(a[0], a[1]), _mm256_hadd_epi32(a[2], a[3]));
  return _mm_add_epi32(_mm256_castsi256_si128(four), _mm256_extracti128_si256(four, 1));
}

template <int kM>
__attribute__((always_inline)) inline void add_columns(const __m256i (&w)[kRowsW], const int8_t* x, int64_t x_row,
                                                       __m256i (&sums)[kM][kRowsW]) {
#pragma GCC unroll 2
  for (int i = 0; i < kM; ++i) {
    const __m256i words = widen(x + i * x_row);
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) {
      sums[i][r] = _mm256_add_epi32(sums[i][r], _mm256_madd_epi16(w[r], words));
    }
  }
}

// out[kM][4 of 16] = W · x over columns [begin, end) for four rows of W. w and x point to column 0.
template <int kM>
void multiply(const Job& job, const uint8_t* const (&w)[kRowsW], const int8_t* x, int64_t begin, int64_t end,
              int32_t* out) {
  const int64_t x_row = job.tiles_k * kTileColumns;
  __m256i sums[kM][kRowsW];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm256_setzero_si256();
  }
  int64_t k = begin;
  for (; k + kStep <= end; k += kStep) {
    __m256i columns[kRowsW];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) {
      _mm_prefetch(w[r] + kRowsW * job.k + k, _MM_HINT_T1);  // the next rows
      columns[r] = widen(w[r] + k);
    }
    add_columns<kM>(columns, x + k, x_row, sums);
  }
  if (k < end) {
    __m256i columns[kRowsW];
    for (int r = 0; r < kRowsW; ++r) {
      int8_t padded[kStep] = {};
      __builtin_memcpy(padded, w[r] + k, static_cast<size_t>(end - k));
      columns[r] = widen(padded);
    }
    add_columns<kM>(columns, x + k, x_row, sums);
  }
  for (int i = 0; i < kM; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out + i * kTileRows), lane_sums(sums[i]));
}

// Sums of several sections may exceed 32 bits: float64 keeps them integers.
__m256 total_less_zero(const Job& job, int64_t m, const double* totals, __m256i w_sums) {
  const __m256d zero = _mm256_set1_pd(job.x_zeros == nullptr ? 0 : job.x_zeros[m]);
  const __m256d low = _mm256_cvtepi32_pd(_mm256_castsi256_si128(w_sums));
  const __m256d high = _mm256_cvtepi32_pd(_mm256_extracti128_si256(w_sums, 1));
  return _mm256_set_m128(_mm256_cvtpd_ps(_mm256_fnmadd_pd(zero, high, _mm256_load_pd(totals + 4))),
                         _mm256_cvtpd_ps(_mm256_fnmadd_pd(zero, low, _mm256_load_pd(totals))));
}

}  // namespace

void avx2::int8_int8_gemv(const Job& job, int64_t begin, int64_t end) {
  const int64_t count = job.m * kTileRows;
  int32_t* sums = static_cast<int32_t*>(scratch(Scratch::kSums, count * int64_t{sizeof(int32_t) + sizeof(double)}));
  double* totals = reinterpret_cast<double*>(sums + count);
  const int64_t x_row = job.tiles_k * kTileColumns;
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t s = 0; s < job.sections; ++s) {
      const int64_t k = s * job.section, k_end = least(k + job.section, job.k);
      for (int quad = 0; quad < kTileRows; quad += kRowsW) {
        const uint8_t* w[kRowsW];  // past N the last row again; its results are not written
        for (int r = 0; r < kRowsW; ++r) {
          w[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
        }
        int64_t m = 0;
        for (; m + kRowsX <= job.m; m += kRowsX) {
          multiply<kRowsX>(job, w, job.int8.values + m * x_row, k, k_end, sums + m * kTileRows + quad);
        }
        if (m < job.m) multiply<1>(job, w, job.int8.values + m * x_row, k, k_end, sums + m * kTileRows + quad);
      }
      for (int64_t i = 0; job.sections > 1 && i < count; i += 4) {
        const __m256d sum = _mm256_cvtepi32_pd(_mm_load_si128(reinterpret_cast<const __m128i*>(sums + i)));
        _mm256_store_pd(totals + i, s == 0 ? sum : _mm256_add_pd(_mm256_load_pd(totals + i), sum));
      }
    }
    for (int64_t first = 0; first < kTileRows && n + first < job.n; first += 8) {
      const Columns columns = load_columns(job, n + first);
      const __m256 scales = load_scales(job, n + first);
      const __m256i w_sums = sums_of_integers(job, n + first, scales);
      for (int64_t m = 0; m < job.m; ++m) {
        const int64_t at = m * kTileRows + first;
        const __m256i* integers = reinterpret_cast<const __m256i*>(sums + at);
        const __m256 sum = job.sections == 1
                               ? _mm256_cvtepi32_ps(less_zero(job, m, _mm256_load_si256(integers), w_sums))
                               : total_less_zero(job, m, totals + at, w_sums);
        write_row(job, columns, m, _mm256_mul_ps(sum, scales));
      }
    }
  }
}

}  // namespace qao::cpu
