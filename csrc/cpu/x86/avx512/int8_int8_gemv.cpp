// W8A8 kernel for a few rows of x with VNNI: lanes along K, four rows of W by up to six of x.
//
// `vpdpbusd` needs one unsigned operand: W ^ 0x80 is W + 128; 128 times the sum of x is subtracted at the end. Each row
// of W is one stream of pages; four at once, with the next four prefetched meanwhile, keep memory busy.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/int8_output.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kRowsX = 6;

// Sums over the lanes of four registers.
__attribute__((always_inline)) inline __m128i lane_sums(const __m512i (&a)[kRowsW]) {
  const __m512i pair01 = _mm512_add_epi32(_mm512_unpacklo_epi32(a[0], a[1]), _mm512_unpackhi_epi32(a[0], a[1]));
  const __m512i pair23 = _mm512_add_epi32(_mm512_unpacklo_epi32(a[2], a[3]), _mm512_unpackhi_epi32(a[2], a[3]));
  const __m512i four = _mm512_add_epi32(_mm512_unpacklo_epi64(pair01, pair23), _mm512_unpackhi_epi64(pair01, pair23));
  const __m256i two = _mm256_add_epi32(_mm512_castsi512_si256(four), _mm512_extracti64x4_epi64(four, 1));
  return _mm_add_epi32(_mm256_castsi256_si128(two), _mm256_extracti128_si256(two, 1));
}

template <int kM>
__attribute__((always_inline)) inline void add_columns(const __m512i (&w)[kRowsW], const int8_t* x, int64_t x_row,
                                                       __m512i (&sums)[kM][kRowsW]) {
  __m512i flipped[kRowsW];
#pragma GCC unroll 4
  for (int r = 0; r < kRowsW; ++r) flipped[r] = _mm512_xor_si512(w[r], _mm512_set1_epi8(-128));
#pragma GCC unroll 6
  for (int i = 0; i < kM; ++i) {
    const __m512i bytes = _mm512_load_si512(x + i * x_row);
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) sums[i][r] = _mm512_dpbusd_epi32(sums[i][r], flipped[r], bytes);
  }
}

// out[kM][4 of 16] = (W + 128) · x over columns [begin, end) for four rows of W. w and x point to column 0.
template <int kM, bool kFetch>
void multiply(const Job& job, const uint8_t* const (&w)[kRowsW], const int8_t* x, int64_t begin, int64_t end,
              int32_t* out) {
  const int64_t x_row = job.tiles_k * kTileColumns;
  __m512i sums[kM][kRowsW];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm512_setzero_si512();
  }
  int64_t k = begin;
  for (; k + kTileColumns <= end; k += kTileColumns) {
    __m512i columns[kRowsW];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) {
      columns[r] = _mm512_loadu_si512(w[r] + k);
      if constexpr (kFetch) _mm_prefetch(w[r] + kRowsW * job.k + k, _MM_HINT_T1);
    }
    add_columns<kM>(columns, x + k, x_row, sums);
  }
  if (k < end) {
    const __mmask64 mask = ~__mmask64{0} >> (kTileColumns - (end - k));
    __m512i columns[kRowsW];
    for (int r = 0; r < kRowsW; ++r) columns[r] = _mm512_maskz_loadu_epi8(mask, w[r] + k);
    add_columns<kM>(columns, x + k, x_row, sums);
  }
  for (int i = 0; i < kM; ++i) _mm_store_si128(reinterpret_cast<__m128i*>(out + i * kTileRows), lane_sums(sums[i]));
}

template <bool kFetch, int kM = kRowsX>
void multiply_some(const Job& job, const uint8_t* const (&w)[kRowsW], int64_t m, int64_t begin, int64_t end,
                   int32_t* out) {
  if constexpr (kM > 0) {
    if (job.m - m >= kM) {
      const int8_t* x = job.int8.values + m * job.tiles_k * kTileColumns;
      return multiply<kM, kFetch>(job, w, x, begin, end, out + m * kTileRows);
    }
    multiply_some<kFetch, kM - 1>(job, w, m, begin, end, out);
  }
}

// Sums of several sections may exceed 32 bits: float64 keeps them integers.
void add_to_totals(__m512i sum, bool first, double* totals) {
  for (int half = 0; half < 2; ++half, totals += kTileRows / 2) {
    const __m512d add = _mm512_cvtepi32_pd(half == 0 ? _mm512_castsi512_si256(sum) : _mm512_extracti64x4_epi64(sum, 1));
    _mm512_store_pd(totals, first ? add : _mm512_add_pd(_mm512_load_pd(totals), add));
  }
}
__m512 total_less_zero(const Job& job, int64_t m, const double* totals, __m512i w_sums) {
  const __m512d zero = _mm512_set1_pd(job.x_zeros == nullptr ? 0 : job.x_zeros[m]);
  const __m512d low = _mm512_cvtepi32_pd(_mm512_castsi512_si256(w_sums));
  const __m512d high = _mm512_cvtepi32_pd(_mm512_extracti64x4_epi64(w_sums, 1));
  const __m256 sums[2] = {_mm512_cvtpd_ps(_mm512_fnmadd_pd(zero, low, _mm512_load_pd(totals))),
                          _mm512_cvtpd_ps(_mm512_fnmadd_pd(zero, high, _mm512_load_pd(totals + kTileRows / 2)))};
  return _mm512_insertf32x8(_mm512_castps256_ps512(sums[0]), sums[1], 1);
}

}  // namespace

void avx512::int8_int8_gemv(const Job& job, int64_t begin, int64_t end) {
  const int64_t count = job.m * kTileRows;
  int32_t* sums = static_cast<int32_t*>(scratch(Scratch::kSums, count * int64_t{sizeof(int32_t) + sizeof(double)}));
  double* totals = reinterpret_cast<double*>(sums + count);
  const auto products = [&](int64_t m, int64_t s) {  // of x's integers with W's
    const __m512i excess = _mm512_set1_epi32(static_cast<int32_t>(128 * job.x_sums[m * job.sections + s]));
    return _mm512_sub_epi32(_mm512_load_si512(sums + m * kTileRows), excess);
  };
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t s = 0; s < job.sections; ++s) {
      const int64_t k = s * job.section, k_end = least(k + job.section, job.k);
      for (int quad = 0; quad < kTileRows; quad += kRowsW) {
        const uint8_t* w[kRowsW];  // past N the last row again; its results are not written
        for (int r = 0; r < kRowsW; ++r) {
          w[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
        }
        multiply_some<true>(job, w, 0, k, k_end, sums + quad);
        for (int64_t m = kRowsX; m < job.m; m += kRowsX) multiply_some<false>(job, w, m, k, k_end, sums + quad);
      }
      for (int64_t m = 0; job.sections > 1 && m < job.m; ++m) {
        add_to_totals(products(m, s), s == 0, totals + m * kTileRows);
      }
    }
    const Columns columns = load_columns(job, n);
    const __m512 scales = load_scales(job, n);
    const __m512i w_sums = sums_of_integers(job, n, scales);
    for (int64_t m = 0; m < job.m; ++m) {
      const __m512 sum = job.sections == 1 ? _mm512_cvtepi32_ps(less_zero(job, m, products(m, 0), w_sums))
                                           : total_less_zero(job, m, totals + m * kTileRows, w_sums);
      write_row(job, columns, m, _mm512_mul_ps(sum, scales));
    }
  }
}

}  // namespace qao::cpu
