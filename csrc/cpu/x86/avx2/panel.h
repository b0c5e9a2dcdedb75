// Shared base of panel_gemm.h formats with AVX2: 16 rows of W, and the expansion of bytes to panels.
// `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/avx2/int4_panel.h"
#include "cpu/x86/avx2/int8_output.h"
#include "cpu/x86/panel_gemm.h"

namespace qao::cpu {
namespace {

// Registers: 12 sums, two of W, and a word of x.
struct Avx2Panel {
  static constexpr int kLanes = 8, kVectors = 2, kPanelsAtOnce = 1;
  static constexpr bool kHasShortSections = false, kHasRests = false, kTakesZerosOff = false;
  static __m256 plus(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256i plus(__m256i a, __m256i b) { return _mm256_add_epi32(a, b); }
};

struct FloatTotals {
  using Total = __m256;
  static Total load_total(const uint32_t* totals) { return _mm256_load_ps(reinterpret_cast<const float*>(totals)); }
  static void store(uint32_t* totals, Total total) { _mm256_store_ps(reinterpret_cast<float*>(totals), total); }
};

// Integer sums, for int8 x and int8 or int4 W.
struct IntegerSums : Avx2Panel {
  using Sum = __m256i;
  using Operand = __m256i;
  static Sum zero() { return _mm256_setzero_si256(); }
  static Operand load(const uint32_t* words) { return _mm256_load_si256(reinterpret_cast<const __m256i*>(words)); }
  static Operand broadcast(const uint32_t* word) { return _mm256_set1_epi32(static_cast<int>(*word)); }
};

// Forces the addition now: the compiler would otherwise collect products, for which there are no registers.
__attribute__((always_inline)) inline __m256i now(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

// Calls visit(n, totals) for eight columns of y at a time, with the address of their totals.
template <typename Visit>
void each_eight(const Job& job, int64_t tile_n, const uint32_t* totals, const Visit& visit) {
  for (int64_t n = tile_n * kTileRows; n < least((tile_n + 1) * kTileRows, job.n); n += 8) {
    visit(n, totals + n % kTileRows);
  }
}

// Sums of int8 products, in int32 over all of K.
struct IntegerTotals : PlainTotals<IntegerSums>, EightBits {
  static constexpr int kStepsOfPart = 1;
  static constexpr bool kSectioned = false;
  using Total = __m256i;
  static Total load_total(const uint32_t* totals) { return load(totals); }
  static void store(uint32_t* totals, Total total) { _mm256_store_si256(reinterpret_cast<__m256i*>(totals), total); }
};
// Writes y. Totals are too large by `excess` times the sum of x.
inline void finish_int8(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows, int excess) {
  each_eight(job, tile_n, totals, [&](int64_t n, const uint32_t* eight) {
    const Columns columns = load_columns(job, n);
    const __m256 scales = load_scales(job, n);
    const __m256i w_sums = sums_of_integers(job, n, scales);
    for (int64_t m = rows.begin; m < rows.end; ++m) {
      const __m256i off = _mm256_set1_epi32(excess * static_cast<int32_t>(job.x_sums[m]));
      const __m256i sum = _mm256_sub_epi32(IntegerTotals::load_total(eight + m * kTileRows), off);
      write_row(job, columns, m, _mm256_mul_ps(_mm256_cvtepi32_ps(less_zero(job, m, sum, w_sums)), scales));
    }
  });
}

// Stores eight rows of eight words transposed, as the steps given by column(i).
template <typename Column>
__attribute__((always_inline)) inline void store_steps(__m256i (&rows)[8], uint32_t* out, int64_t stride,
                                                       const Column& column) {
  transpose8(rows);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) _mm256_store_si256(reinterpret_cast<__m256i*>(out + column(i) * stride), rows[i]);
}

// kBytes of a row of 8-bit W from column k on. Rows past N repeat the last one and are not written. Zeros past K.
template <int kBytes>
inline const uint8_t* row_bytes(const Job& job, int64_t n, int64_t k, uint8_t (&padded)[kBytes]) {
  const uint8_t* bytes = job.weight + least(n, job.n - 1) * job.k + k;
  if (job.k - k >= kBytes) return bytes;
  __builtin_memset(padded, 0, kBytes);
  __builtin_memcpy(padded, bytes, static_cast<size_t>(job.k - k));
  return padded;
}

// Scales and zero points of a group of 16 rows of int4 W.
struct Int4Group {
  alignas(32) float scale[kTileRows], zero[kTileRows];
};
inline void load_int4_group(const Job& job, int64_t tile_n, int64_t group, Int4Group* out) {
  const int64_t at = (tile_n * job.groups + group) * job.parameters * kTileRows;
  for (int row = 0; row < kTileRows; row += 8) {
    _mm256_store_ps(out->scale + row, load8(job.scales, at + row, job.scale_dtype));
    _mm256_store_ps(out->zero + row, job.parameters == 2 ? load8(job.scales, at + kTileRows + row, job.scale_dtype)
                                                         : _mm256_set1_ps(int4::kSymmetricZero));
  }
}

// W4A8 as bytes in the order of int4_panel.h: total += scale * (sum(q * x) - zero * sum(x)). Zero points, x's first,
// are subtracted per section: if x is far from 0 along all of K, sums of its bytes are large.
struct Int4Bytes : IntegerSums, FloatTotals {
  static constexpr int64_t kSteps = 64, kColumns = 4, kPanelColumns = kSteps * kColumns;
  static constexpr int kBits = 4;
  static constexpr bool kSectioned = true;
  static Sum less(Sum sums, int32_t zero, Sum w_sums) {
    return _mm256_sub_epi32(sums, _mm256_mullo_epi32(_mm256_set1_epi32(zero), w_sums));
  }
  using Parameters = Int4Group;
  static void prepare(const Job& job, int64_t tile_n, int64_t group, Int4Group* out) {
    load_int4_group(job, tile_n, group, out);
  }
  static void expand(const Job& job, int64_t tile_n, int64_t panel, const Int4Group*, int, uint32_t* out,
                     int64_t stride) {
    for (int64_t k = 0; k < kPanelColumns && panel * kPanelColumns + k < job.k; k += kTileColumns) {
      const int64_t tile_k = (panel * kPanelColumns + k) / kTileColumns;
      const uint8_t* weight = job.weight + (tile_n * job.tiles_k + tile_k) * int4::kTileBytes;
      expand_tile(weight, reinterpret_cast<uint8_t*>(out + k / kColumns * stride), 4 * stride);
    }
  }
  struct Fold {
    const float *scale, *zero;  // in memory: 12 sums leave few registers
  };
  using Row = __m256;  // its sum
  static Fold fold(const Job&, const Int4Group& group, int v, int64_t, int64_t) {
    return {group.scale + 8 * v, group.zero + 8 * v};
  }
  static Row row(const Job& job, int64_t m, int64_t s) {
    return _mm256_broadcast_ss(job.x_sums + m * job.sections + s);
  }
  static Total add(const Fold& w, Row x_sum, Sum sums, Total before) {
    const __m256 value = _mm256_fnmadd_ps(_mm256_load_ps(w.zero), x_sum, _mm256_cvtepi32_ps(sums));
    return _mm256_fmadd_ps(value, _mm256_load_ps(w.scale), before);
  }
  template <int kTiles>
  static void finish(const Job& job, int64_t tile_n, const uint32_t* totals, RowsOfY rows) {
    each_eight(job, tile_n, totals, [&](int64_t n, const uint32_t* eight) {
      const Columns columns = load_columns(job, n);
      for (int64_t m = rows.begin; m < rows.end; ++m) write_row(job, columns, m, load_total(eight + m * kTileRows));
    });
  }
};

}  // namespace
}  // namespace qao::cpu
