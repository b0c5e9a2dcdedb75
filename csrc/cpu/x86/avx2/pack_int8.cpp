// Packing of int8 x as padded rows or panels (panel_gemm.h), with section sums.
// Columns are in the order of W's bytes.
#include <immintrin.h>

#include "cpu/gemm/kernels.h"

namespace qao::cpu {
namespace {

struct Columns {
  __m128i part[4];  // 16 columns each
};

// Loads `count` columns, padded with `zero`.
Columns load_columns(const int8_t* x, int64_t count, int zero) {
  alignas(64) int8_t padded[kTileColumns];
  if (count < kTileColumns) {
    __builtin_memset(padded, zero, sizeof(padded));
    __builtin_memcpy(padded, x, static_cast<size_t>(count));
    x = padded;
  }
  Columns columns;
  for (int i = 0; i < 4; ++i) columns.part[i] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x) + i);
  return columns;
}

// int4::tile_column(): fours of columns 2t, 2t + 8, 2t + 1, 2t + 9 of each part; those of one t are adjacent.
Columns in_tile_order(const Columns& columns) {
  __m128i fours[4];
  for (int i = 0; i < 4; ++i) fours[i] = _mm_unpacklo_epi8(columns.part[i], _mm_srli_si128(columns.part[i], 8));
  const __m128i low01 = _mm_unpacklo_epi32(fours[0], fours[1]), high01 = _mm_unpackhi_epi32(fours[0], fours[1]);
  const __m128i low23 = _mm_unpacklo_epi32(fours[2], fours[3]), high23 = _mm_unpackhi_epi32(fours[2], fours[3]);
  return {_mm_unpacklo_epi64(low01, low23), _mm_unpackhi_epi64(low01, low23), _mm_unpacklo_epi64(high01, high23),
          _mm_unpackhi_epi64(high01, high23)};
}

int sum(__m128i a, __m128i b) {
  const __m128i ones8 = _mm_set1_epi8(1), ones16 = _mm_set1_epi16(1);
  const __m128i pairs = _mm_add_epi16(_mm_maddubs_epi16(ones8, a), _mm_maddubs_epi16(ones8, b));
  const __m128i fours = _mm_madd_epi16(pairs, ones16);
  const __m128i halves = _mm_add_epi32(fours, _mm_unpackhi_epi64(fours, fours));
  return _mm_cvtsi128_si32(halves) + _mm_extract_epi32(halves, 1);
}

// The order of a panel (int4_panel.h): all of the first 32 columns before the others.
Columns in_panel_order(const Columns& columns) {
  const Columns tile = in_tile_order(columns);
  return {_mm_unpacklo_epi64(tile.part[0], tile.part[1]), _mm_unpacklo_epi64(tile.part[2], tile.part[3]),
          _mm_unpackhi_epi64(tile.part[0], tile.part[1]), _mm_unpackhi_epi64(tile.part[2], tile.part[3])};
}

// Computes the section sums of row m, minus its zero point if W is int4, and calls store(k, columns) per K-tile.
template <typename Store>
void pack_row(const Job& job, int64_t m, const Store& store) {
  const int8_t* x = static_cast<const int8_t*>(job.x) + m * job.x_stride;
  float* sums = job.x_sums + m * job.sections;
  const int zero = job.weight_format == Format::kInt4 && job.x_zeros != nullptr ? job.x_zeros[m] : 0;
  for (int64_t s = 0; s < job.sections; ++s) sums[s] = 0;
  for (int64_t k = 0; k < job.k; k += kTileColumns) {
    const Columns columns = load_columns(x + k, job.k - k, zero);
    for (int half = 0; half < 2 && k + 32 * half < job.k; ++half) {
      sums[(k + 32 * half) / job.section] +=
          static_cast<float>(sum(columns.part[2 * half], columns.part[2 * half + 1]) - 32 * zero);
    }
    store(k, columns);
  }
}

void store_columns(const Columns& columns, void* out) {
  for (int i = 0; i < 4; ++i) _mm_store_si128(static_cast<__m128i*>(out) + i, columns.part[i]);
}

}  // namespace

void avx2::pack_int8_rows(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    pack_row(job, m, [&](int64_t k, const Columns& columns) {
      int8_t* out = job.int8.values + m * job.tiles_k * kTileColumns + k;
      store_columns(job.weight_format == Format::kInt4 ? in_tile_order(columns) : columns, out);
    });
  }
}

void avx2::pack_int8_panels(const Job& job, int64_t begin, int64_t end) {
  constexpr int64_t kSteps = 64, kPanelColumns = 4 * kSteps;
  for (int64_t m = begin; m < end; ++m) {
    pack_row(job, m, [&](int64_t k, const Columns& columns) {
      uint32_t* out = job.panels + (k / kPanelColumns * job.m + m) * kSteps + k % kPanelColumns / 4;
      store_columns(job.weight_format == Format::kInt4 ? in_panel_order(columns) : columns, out);
    });
  }
}

}  // namespace qao::cpu
