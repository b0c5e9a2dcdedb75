// What the AMX kernels of int8 share: from C tiles to y. `static`: see numeric.h.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/x86/amx/tiles.h"
#include "cpu/x86/avx512/int8_output.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {

constexpr int kTileSums = kTileRegisterRows * kTileRegisterRows;  // of a C tile, [16 n][16 m]

// B tiles along K of a group, the last one's aside.
static inline int64_t group_steps(const Job& job) {
  return job.group_size < kTileColumns ? 1 : (job.group_size + kTileColumns - 1) / kTileColumns;
}

// Sums of 16 rows of x over a group.
static inline __m512 load_sums(const Job& job, int64_t group, int64_t tile_m) {
  return _mm512_load_ps(job.x_sums + (group * job.tiles_m + tile_m) * kTileRows);
}

// y for one N-tile from its sums [tiles_m][16 n][16 m]; to_float(sums) makes 16 of them, of one row of x, float32 and
// scales them by W's scales.
template <typename Sum, typename ToFloat>
static inline void write_tiles(const Job& job, int64_t tile_n, const Sum* sums, const ToFloat& to_float) {
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
