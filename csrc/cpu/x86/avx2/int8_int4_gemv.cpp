// W4A8 kernel for a few rows of x with `vpmaddubsw`: W's unsigned nibbles times the bytes of x.
// Lanes run along K. The two rows g and g + 8 that share W's bytes meet up to three rows of x.
//
// Sums of eight products stay in 16 bits (8 * 2 * 15 * 128 < 2^15) and are exact. Per lane and section of a group:
//   y += scale * (sum(q * x) - zero * sum(x)).
// Zero points, x's first, are subtracted per section and not at the end: if x is far from 0 along all of K, sums of its
// bytes are large.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "cpu/x86/avx2/int8_output.h"
#include "cpu/x86/avx2/simd.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kRowsX = 3;
constexpr int kPairs = kTileN / 2;         // row pairs (g, g + 8) of a tile
constexpr int kVectors = kTileK / 32;      // of a row pair's 64 bytes
static_assert(kMaxSection == 4 * kTileK);  // K-tiles with sums that fit 16 bits

// Scales and zero points of an N-tile and a group.
struct Parameters {
  alignas(32) float scale[kTileN], zero[kTileN];
};
void load_parameters(const Job& job, int64_t tile, Parameters* parameters) {
  for (int64_t group = 0; group < job.groups; ++group) {
    const int64_t at = (tile * job.groups + group) * job.parameters * kTileN;
    for (int row = 0; row < kTileN; row += 8) {
      const __m256 scale = load8(job.scales, at + row, job.scale_dtype);
      const __m256 zero = job.parameters == 2 ? load8(job.scales, at + kTileN + row, job.scale_dtype)
                                              : _mm256_set1_ps(int4::kSymmetricZero);
      _mm256_store_ps(parameters[group].scale + row, scale);
      _mm256_store_ps(parameters[group].zero + row, zero);
    }
  }
}

// products[2][kM] += one K-tile of a row pair, in 16 bits, and w_sums[2] with kXZeros.
template <bool kXZeros, int kM>
__attribute__((always_inline)) inline void add_tile(const uint8_t* pair, const int8_t* x, int64_t x_row,
                                                    __m256i (&products)[2][kM], __m256i (&w_sums)[2]) {
  const __m256i mask = _mm256_set1_epi8(0x0F);
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
    const __m256i both = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(pair) + v);
    const __m256i low = _mm256_and_si256(both, mask), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), mask);
    if constexpr (kXZeros) {
      w_sums[0] = _mm256_add_epi16(w_sums[0], _mm256_maddubs_epi16(low, _mm256_set1_epi8(1)));
      w_sums[1] = _mm256_add_epi16(w_sums[1], _mm256_maddubs_epi16(high, _mm256_set1_epi8(1)));
    }
#pragma GCC unroll 3
    for (int i = 0; i < kM; ++i) {
      const __m256i bytes = _mm256_load_si256(reinterpret_cast<const __m256i*>(x + i * x_row) + v);
      products[0][i] = _mm256_add_epi16(products[0][i], _mm256_maddubs_epi16(low, bytes));
      products[1][i] = _mm256_add_epi16(products[1][i], _mm256_maddubs_epi16(high, bytes));
    }
  }
}

// Sections of at least a K-tile: with groups of 32 a section holds two groups.
int64_t sections(const Job& job) { return divide_up(job.tiles_k, divide_up(job.section, kTileK)); }

// End of the section that begins with K-tile `tile`.
int64_t section_end(const Job& job, int64_t tile) { return least(tile + divide_up(job.section, kTileK), job.tiles_k); }

// out[m][sections][8]: sums of x minus its zero point, in the lanes of its products with W.
void sum_lanes(const Job& job, float* out) {
  const __m256i ones = _mm256_set1_epi8(1);
  for (int64_t m = 0; m < job.m; ++m) {
    const __m256i zeros = _mm256_set1_epi16(static_cast<int16_t>(job.x_zeros != nullptr ? 2 * job.x_zeros[m] : 0));
    for (int64_t tile = 0; tile < job.tiles_k; out += 8) {
      __m256i sum = _mm256_setzero_si256();
      for (const int64_t end = section_end(job, tile); tile < end; ++tile) {
        const __m256i* x = reinterpret_cast<const __m256i*>(job.int8.values + (m * job.tiles_k + tile) * kTileK);
        for (int v = 0; v < kVectors; ++v) {
          const __m256i pairs = _mm256_maddubs_epi16(ones, _mm256_load_si256(x + v));
          sum = _mm256_add_epi16(sum, _mm256_sub_epi16(pairs, zeros));
        }
      }
      _mm256_store_ps(out, _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))));
    }
  }
}

// Scale and zero point per lane of a row in the K-tiles from `tile` on. With groups of 32 they belong to two groups, in
// the pattern 0 0 1 1.
struct RowParameters {
  __m256 scale, zero;
};
RowParameters of_row(const Job& job, const Parameters* parameters, int64_t tile, int row) {
  const Parameters* group = parameters + tile * kTileK / job.group_size;
  const RowParameters values = {_mm256_broadcast_ss(group->scale + row), _mm256_broadcast_ss(group->zero + row)};
  if (job.group_size != 32 || group + 1 == parameters + job.groups) return values;
  return {_mm256_blend_ps(values.scale, _mm256_broadcast_ss(group[1].scale + row), 0xCC),
          _mm256_blend_ps(values.zero, _mm256_broadcast_ss(group[1].zero + row), 0xCC)};
}

__m256 widened(__m256i sums) { return _mm256_cvtepi32_ps(_mm256_madd_epi16(sums, _mm256_set1_epi16(1))); }

// out[kM][16]: rows g and g + 8. x_sums: those of rows m .. m + kM.
template <bool kXZeros, int kM>
void multiply(const Job& job, const uint8_t* weight, const Parameters* parameters, const float* x_sums, int64_t m,
              int g, float* out) {
  const int64_t x_row = job.tiles_k * kTileK, x_sums_row = sections(job) * 8;
  __m256 sums[2][kM];
  for (auto& row : sums) {
    for (auto& sum : row) sum = _mm256_setzero_ps();
  }
  for (int64_t tile = 0; tile < job.tiles_k; x_sums += 8) {
    const int64_t end = section_end(job, tile);
    const int64_t begin = tile;
    __m256i products[2][kM], w_sums[2] = {};
    for (auto& row : products) {
      for (auto& product : row) product = _mm256_setzero_si256();
    }
    for (; tile < end; ++tile) {
      const uint8_t* pair = weight + tile * kTileBytes + g * kTileK;
      _mm_prefetch(pair + job.tiles_k * kTileBytes, _MM_HINT_T1);  // the next N-tile
      add_tile<kXZeros, kM>(pair, job.int8.values + m * x_row + tile * kTileK, x_row, products, w_sums);
    }
    for (int row = 0; row < 2; ++row) {
      const RowParameters values = of_row(job, parameters, begin, g + row * kPairs);
      for (int i = 0; i < kM; ++i) {
        __m256 value = widened(products[row][i]);
        if constexpr (kXZeros) {
          const __m256 x_zero = _mm256_set1_ps(static_cast<float>(job.x_zeros[m + i]));
          value = _mm256_fnmadd_ps(x_zero, widened(w_sums[row]), value);
        }
        value = _mm256_fnmadd_ps(values.zero, _mm256_load_ps(x_sums + i * x_sums_row), value);
        sums[row][i] = _mm256_fmadd_ps(value, values.scale, sums[row][i]);
      }
    }
  }
  for (int i = 0; i < kM; ++i) {
    out[i * kTileN + g] = lane_sum(sums[0][i]);
    out[i * kTileN + g + kPairs] = lane_sum(sums[1][i]);
  }
}

template <int kM = kRowsX>
void multiply_some(const Job& job, const uint8_t* weight, const Parameters* parameters, const float* x_sums, int64_t m,
                   int g, float* out) {
  if constexpr (kM > 0) {
    const float* x_sums_row = x_sums + m * sections(job) * 8;
    if (job.m - m >= kM) {
      if (job.x_zeros == nullptr)
        return multiply<false, kM>(job, weight, parameters, x_sums_row, m, g, out + m * kTileN);
      return multiply<true, kM>(job, weight, parameters, x_sums_row, m, g, out + m * kTileN);
    }
    multiply_some<kM - 1>(job, weight, parameters, x_sums, m, g, out);
  }
}

}  // namespace

void avx2::int8_int4_gemv(const Job& job, int64_t begin, int64_t end) {
  auto* parameters =
      static_cast<Parameters*>(scratch(Scratch::kPanel, job.groups * static_cast<int64_t>(sizeof(Parameters))));
  const int64_t values = job.m * (kTileN + sections(job) * 8);
  float* sums = static_cast<float*>(scratch(Scratch::kSums, values * int64_t{sizeof(float)}));
  float* x_sums = sums + job.m * kTileN;
  sum_lanes(job, x_sums);
  for (int64_t tile = begin; tile < end; ++tile) {
    const uint8_t* weight = job.weight + tile * job.tiles_k * kTileBytes;
    load_parameters(job, tile, parameters);
    for (int g = 0; g < kPairs; ++g) {
      for (int64_t m = 0; m < job.m; m += kRowsX) multiply_some(job, weight, parameters, x_sums, m, g, sums);
    }
    for (int64_t row = 0; row < kTileN && tile * kTileN + row < job.n; row += 8) {
      const Columns columns = load_columns(job, tile * kTileN + row);
      for (int64_t m = 0; m < job.m; ++m) {
        write_row(job, columns, m, _mm256_load_ps(sums + m * kTileN + row));
      }
    }
  }
}

}  // namespace qao::cpu
