// W4A8 kernel for a few rows of x with VNNI: W's unsigned nibbles, unshifted, times the bytes of x.
// Lanes stay separate until the end of the row: lane j holds columns 4 j .. 4 j + 3 in tile_column()'s order.
//
// Per row and section, with exact integer sums:  y += scale * (sum(q * x) - zero * sum(x)), where x is its bytes minus
// their zero point, if any.
#include "cpu/gemm/kernels.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx512/int4_parameters.h"
#include "cpu/x86/avx512/int8_output.h"
#include "cpu/x86/avx512/simd.h"
#include "cpu/x86/weight_stream.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kPairs = 8;     // row pairs (g, g + 8) of a tile
constexpr int kMaxTiles = 4;  // K-tiles summed before their scale is applied

// With groups of 32 the lanes of a row belong to two groups, in the pattern 0 0 1 1.
template <bool kHalves>
__attribute__((always_inline)) inline __m512 of_row(const float* group0, const float* group1, int row) {
  const __m512 value = _mm512_set1_ps(group0[row]);
  if constexpr (!kHalves) return value;
  return _mm512_mask_blend_ps(0xCCCC, value, _mm512_set1_ps(group1[row]));
}

template <int kTiles>
__attribute__((always_inline)) inline __m512i dot(__m512i sum, const __m512i (&w)[kTiles], const __m512i (&x)[kTiles]) {
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) sum = _mm512_dpbusd_epi32(sum, w[t], x[t]);
  return sum;
}

// sums[row] += kTiles K-tiles of one group, or of two halves. Without zero points (kZeros) all are 8, and sums start at
// the amount to subtract. x_zero is subtracted from the bytes of x with kXZeros.
template <bool kHalves, bool kZeros, bool kXZeros, int kTiles>
__attribute__((always_inline)) inline void add_tiles(const uint8_t* weight, const int8_t* x, int x_zero,
                                                     const Int4Parameters* parameters, WeightStream& stream,
                                                     __m512 (&sums)[kTileN]) {
  __m512i columns[kTiles], ones[kTiles];
#pragma GCC unroll 4
  for (int t = 0; t < kTiles; ++t) {
    stream.fetch();
    columns[t] = _mm512_load_si512(x + t * kTileK);
    ones[t] = _mm512_set1_epi8(1);
  }
  const __m512i none = _mm512_setzero_si512(), offset = _mm512_set1_epi32(kXZeros ? -4 * kTiles * x_zero : 0);
  const __m512i x_sums = dot<kTiles>(offset, ones, columns);
  const __m512 float_zero = _mm512_set1_ps(static_cast<float>(x_zero));
  static_assert(int4::kSymmetricZero == 1 << 3);
  const __m512i low_start = kZeros ? none : _mm512_sub_epi32(none, _mm512_slli_epi32(x_sums, 3));
  const __m512i high_start = kZeros ? none : _mm512_slli_epi32(low_start, 4);  // rows 8..15 are 16 times their q
  const __m512 float_sums = _mm512_cvtepi32_ps(x_sums);
  const auto add_row = [&](int row, __m512i start, const __m512i(&q)[kTiles]) __attribute__((always_inline)) {
    __m512 value = _mm512_cvtepi32_ps(dot<kTiles>(start, q, columns));
    if constexpr (kXZeros) {  // all below 2^24
      value = _mm512_fnmadd_ps(float_zero, _mm512_cvtepi32_ps(dot<kTiles>(none, q, ones)), value);
    }
    if constexpr (kZeros) {
      value = _mm512_fnmadd_ps(of_row<kHalves>(parameters[0].zero, parameters[1].zero, row), float_sums, value);
    }
    sums[row] = _mm512_fmadd_ps(value, of_row<kHalves>(parameters[0].scale, parameters[1].scale, row), sums[row]);
  };
#pragma GCC unroll 8
  for (int g = 0; g < kPairs; ++g) {
    __m512i low[kTiles], high[kTiles];
#pragma GCC unroll 4
    for (int t = 0; t < kTiles; ++t) {
      const __m512i bytes = _mm512_loadu_si512(weight + t * kTileBytes + g * kTileK);
      low[t] = _mm512_and_si512(bytes, _mm512_set1_epi8(0x0F));
      high[t] = _mm512_and_si512(bytes, _mm512_set1_epi8(static_cast<char>(0xF0)));
    }
    add_row(g, low_start, low);
    add_row(g + kPairs, high_start, high);
  }
}

// Reduces sixteen rows of lanes to one vector of row sums.
__m512 lane_sums(const __m512 (&rows)[kTileN]) {
  __m512i lanes[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) lanes[row] = _mm512_castps_si512(rows[row]);
  transpose16(lanes);
  __m512 sum = _mm512_castsi512_ps(lanes[0]);
#pragma GCC unroll 16
  for (int i = 1; i < kTileN; ++i) sum = _mm512_add_ps(sum, _mm512_castsi512_ps(lanes[i]));
  return sum;
}

template <bool kHalves, bool kZeros, bool kXZeros, int kTiles>
void run_tile(const Job& job, int64_t tile, int64_t m, const Int4Parameters* parameters, WeightStream stream) {
  const uint8_t* weight = job.weight + tile * job.tiles_k * kTileBytes;
  const int8_t* x = job.int8.values + m * job.tiles_k * kTileK;
  const int x_zero = kXZeros ? job.x_zeros[m] : 0;
  __m512 sums[kTileN];
#pragma GCC unroll 16
  for (int row = 0; row < kTileN; ++row) sums[row] = _mm512_setzero_ps();
  int64_t t = 0;
  for (; t + kTiles <= job.tiles_k; t += kTiles) {
    add_tiles<kHalves, kZeros, kXZeros, kTiles>(weight + t * kTileBytes, x + t * kTileK, x_zero,
                                                parameters + t * kTileK / job.group_size, stream, sums);
  }
  for (; t < job.tiles_k; ++t) {
    add_tiles<kHalves, kZeros, kXZeros, 1>(weight + t * kTileBytes, x + t * kTileK, x_zero,
                                           parameters + t * kTileK / job.group_size, stream, sums);
  }
  write_row(job, load_columns(job, tile * kTileN), m, lane_sums(sums));
}

template <bool kHalves, bool kZeros, bool kXZeros, int kTiles>
void run(const Job& job, int64_t begin, int64_t end) {
  const uint8_t* weight = job.weight + begin * job.tiles_k * kTileBytes;
  const int64_t bytes = (job.groups + 1) * static_cast<int64_t>(sizeof(Int4Parameters));
  auto* parameters = static_cast<Int4Parameters*>(scratch(Scratch::kPanel, bytes));
  parameters[job.groups] = Int4Parameters{};  // for the second half of a last K-tile with only one
  for (int64_t tile = begin; tile < end; ++tile) {
    load_shifted_parameters(job, tile, parameters);
    for (int64_t m = 0; m < job.m; ++m) {
      const WeightStream stream(weight, tile - begin, job.tiles_k);
      run_tile<kHalves, kZeros, kXZeros, kTiles>(job, tile, m, parameters, stream);
    }
  }
}

template <bool kZeros, bool kXZeros>
void run_groups(const Job& job, int64_t begin, int64_t end) {
  switch (job.group_size) {
    case 32:
      return run<true, kZeros, kXZeros, 1>(job, begin, end);
    case 64:
      return run<false, kZeros, kXZeros, 1>(job, begin, end);
    case 128:
      return run<false, kZeros, kXZeros, 2>(job, begin, end);
    default:
      return run<false, kZeros, kXZeros, kMaxTiles>(job, begin, end);
  }
}

}  // namespace

void avx512::int8_int4_gemv(const Job& job, int64_t begin, int64_t end) {
  const bool zeros = job.parameters == 2;
  if (job.x_zeros != nullptr) {
    zeros ? run_groups<true, true>(job, begin, end) : run_groups<false, true>(job, begin, end);
  } else {
    zeros ? run_groups<true, false>(job, begin, end) : run_groups<false, false>(job, begin, end);
  }
}

}  // namespace qao::cpu
