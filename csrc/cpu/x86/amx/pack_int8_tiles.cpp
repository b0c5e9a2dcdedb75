// Packing of int8 x as AMX B tiles, with group sums.
// A tile is 16 fours of k x 16 rows, columns in the order of W's bytes. For int4 W, the sums are minus x's zero points,
// which also fill columns past K.
#include "cpu/gemm/kernels.h"
#include "cpu/parallel.h"
#include "cpu/x86/amx/int8_tiles.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

constexpr int64_t kTileBytes = kTileRegisterBytes;

struct Order {
  alignas(64) uint8_t column[kTileColumns];
};
constexpr Order tile_order() {
  Order order{};
  for (int i = 0; i < kTileColumns; ++i) order.column[i] = static_cast<uint8_t>(int4::tile_column(i));
  return order;
}
constexpr Order kTileOrder = tile_order();

// Whether row `i` of a tile, a four of columns, belongs to this half, with groups of 32.
constexpr bool in_half(int i, int half) { return i % 4 / 2 == half; }

void store_tile(const __m512i (&fours)[kTileRows], int8_t* out) {
  for (int i = 0; i < kTileRows; ++i) _mm512_store_si512(out + i * kTileColumns, fours[i]);
}

__m512i add_sums(__m512i sums, const __m512i (&fours)[kTileRows]) {
  for (const __m512i& four : fours) sums = _mm512_dpbusd_epi32(sums, _mm512_set1_epi8(1), four);
  return sums;
}

}  // namespace

void amx::pack_int8_tiles(const Job& job, int64_t begin, int64_t end) {
  const bool permuted = job.weight_format == Format::kInt4, halves = job.int8.steps != job.tiles_k;
  const bool ones = has_row_of_ones(job);
  const __m512i order = _mm512_load_si512(kTileOrder.column);
  const int64_t padded_rows = job.tiles_m * kTileRows;
  for (int64_t tile = begin; tile < end; ++tile) {
    const int64_t rows = least(kTileRows, job.m - tile * kTileRows);
    const int8_t* x = static_cast<const int8_t*>(job.x) + tile * kTileRows * job.x_stride;
    int8_t* out = job.int8.values + tile * job.int8.steps * kTileBytes;
    float* sums = job.x_sums + tile * kTileRows;
    alignas(64) int32_t zeros[kTileRows] = {};
    for (int64_t i = 0; i < rows && permuted && job.x_zeros != nullptr; ++i) {
      zeros[i] = job.x_zeros[tile * kTileRows + i];
    }
    const __m512i zero = _mm512_load_si512(zeros), tile_zeros = _mm512_slli_epi32(zero, 6);
    const __m512i half_zeros = _mm512_slli_epi32(zero, 5);
    __m512i group_sums = _mm512_setzero_si512();
    for (int64_t k = 0; k < job.k; k += kTileColumns) {
      const __mmask64 mask = ~__mmask64{0} >> (kTileColumns - least(kTileColumns, job.k - k));
      // Load and transpose a K-tile
      __m512i fours[kTileRows];
#pragma GCC unroll 16
      for (int i = 0; i < kTileRows; ++i) {
        const __m512i past = _mm512_set1_epi8(static_cast<int8_t>(zeros[i]));
        fours[i] = i < rows ? _mm512_mask_loadu_epi8(past, mask, x + i * job.x_stride + k) : past;
        if (i == kRowOfOnes && ones) fours[i] = _mm512_set1_epi8(1);
        if (permuted) fours[i] = _mm512_permutexvar_epi8(order, fours[i]);
      }
      transpose16(fours);
      // Store it as one or two B tiles, with group sums
      if (halves) {
        for (int half = 0; half < 2; ++half, out += kTileBytes) {
          __m512i part[kTileRows];
          for (int i = 0; i < kTileRows; ++i) part[i] = in_half(i, half) ? fours[i] : _mm512_setzero_si512();
          store_tile(part, out);
          const int64_t group = k / 32 + half;
          if (group == job.groups) continue;
          const __m512i part_sums = _mm512_sub_epi32(add_sums(_mm512_setzero_si512(), part), half_zeros);
          _mm512_store_ps(sums + group * padded_rows, _mm512_cvtepi32_ps(part_sums));
        }
      } else {
        store_tile(fours, out);
        out += kTileBytes;
        group_sums = _mm512_sub_epi32(add_sums(group_sums, fours), tile_zeros);
        if ((k + kTileColumns) % job.group_size == 0 || k + kTileColumns >= job.k) {
          _mm512_store_ps(sums + k / job.group_size * padded_rows, _mm512_cvtepi32_ps(group_sums));
          group_sums = _mm512_setzero_si512();
        }
      }
    }
  }
}

}  // namespace qao::cpu
