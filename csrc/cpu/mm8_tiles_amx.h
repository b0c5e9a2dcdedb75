// The inner loop that the AMX kernels of mm8 share: C of 1 or 2 N-tiles x 1 or 2 tiles of x, in registers 0..3; A in
// 4 and 5, B in 6 and 7. `static`: see numeric.h.
#pragma once

#include "cpu/amx.h"
#include "cpu/mm8_finish_avx512.h"
#include "cpu/mm8_kernels.h"
#include "cpu/simd_avx512.h"

namespace qao::cpu {

constexpr int kTileSums = kTileRegisterRows * kTileRegisterRows;  // of a C tile, [16 n][16 m]

template <int kN, int kM>
__attribute__((always_inline)) static inline void each_c(auto&& visit) {
  visit.template operator()<0, 0>();
  if constexpr (kM == 2) visit.template operator()<0, 1>();
  if constexpr (kN == 2) visit.template operator()<1, 0>();
  if constexpr (kN == 2 && kM == 2) visit.template operator()<1, 1>();
}

// A tiles of W along K, of one or two N-tiles. Distances in bytes: of N-tiles, of steps along K, of rows.
struct ATiles {
  const uint8_t* first;
  int64_t tile_n, step, row;
};

// C[kN][kM] += `count` steps; `b` has B tiles side by side, the other tile of x `b_tile` bytes on. Tiles of the next
// step load between the products of this one; those of x, in L2, must not push W out of L1. fetch(i): what to prefetch
// during step i.
template <bool kSigned, int kN, int kM, typename Fetch>
__attribute__((always_inline)) static inline void multiply_tiles(const ATiles& a, const int8_t* b, int64_t b_tile,
                                                                 int64_t count, const Fetch& fetch) {
  const auto multiply = []<int n, int m>() {
    if constexpr (kSigned) {
      tile_multiply_signed_bytes<2 * n + m, 4 + n, 6 + m>();
    } else {
      tile_multiply_bytes<2 * n + m, 4 + n, 6 + m>();
    }
  };
  const uint8_t* next_a = a.first;
  tile_load_once<6>(b);
  tile_load<4>(next_a, a.row);
  if constexpr (kN == 2) tile_load<5>(next_a + a.tile_n, a.row);
  if constexpr (kM == 2) tile_load_once<7>(b + b_tile);
  const auto step = [&]<bool kMore>(int64_t i) __attribute__((always_inline)) {
    next_a += a.step;
    b += kTileRegisterBytes;
    multiply.template operator()<0, 0>();
    if constexpr (kN == 2) multiply.template operator()<1, 0>();
    if constexpr (kMore) tile_load_once<6>(b);
    fetch(i);
    if constexpr (kM == 2) multiply.template operator()<0, 1>();
    if constexpr (kMore) tile_load<4>(next_a, a.row);
    if constexpr (kN == 2 && kM == 2) multiply.template operator()<1, 1>();
    if constexpr (kMore && kM == 2) tile_load_once<7>(b + b_tile);
    if constexpr (kMore && kN == 2) tile_load<5>(next_a + a.tile_n, a.row);
  };
  for (int64_t i = 0; i < count - 1; ++i) step.template operator()<true>(i);
  step.template operator()<false>(count - 1);
}

// y for one N-tile from its sums [tiles_m][16 n][16 m]; to_float(sums) makes 16 of them, of one row of x, float32 and
// scales them by W's scales.
template <typename Sum, typename ToFloat>
static inline void write_tiles(const Mm8Job& job, int64_t tile_n, const Sum* sums, const ToFloat& to_float) {
  const Columns columns = load_columns(job, tile_n * kTileRows);
  for (int64_t first_m = 0; first_m < job.m; first_m += kTileRows, sums += kTileSums) {
    __m512i rows[kTileRows];
#pragma GCC unroll 16
    for (int i = 0; i < kTileRows; ++i) rows[i] = _mm512_load_si512(sums + i * kTileRows);
    transpose16(rows);
    const int64_t count = job.m - first_m < kTileRows ? job.m - first_m : kTileRows;
    for (int64_t i = 0; i < count; ++i) write_row(job, columns, first_m + i, to_float(rows[i]));
  }
}

}  // namespace qao::cpu
