// Definitions shared by the int8 AMX kernels. `static`: see numeric.h.
#pragma once

#include "cpu/gemm/job.h"
#include "cpu/x86/amx/output.h"
#include "cpu/x86/amx/tiles.h"
#include "cpu/x86/avx512/simd.h"

namespace qao::cpu {

constexpr int kTileSums = kTileRegisterRows * kTileRegisterRows;  // of a C tile, [16 n][16 m]

// B tiles along K per group; the last group may have fewer.
static inline int64_t group_steps(const Job& job) {
  return job.group_size < kTileColumns ? 1 : (job.group_size + kTileColumns - 1) / kTileColumns;
}

// For int4 W, if x has zero points and at most 15 rows, row 15 of its tile is 1 along all of K: its products are the
// sums of W.
constexpr int kRowOfOnes = 15;
static inline bool has_row_of_ones(const Job& job) {
  return job.weight_format == Format::kInt4 && job.x_zeros != nullptr && job.m <= kRowOfOnes;
}

// Sums of 16 rows of x over a group; for int4 W, minus their zero points.
static inline __m512 load_sums(const Job& job, int64_t group, int64_t tile_m) {
  return _mm512_load_ps(job.x_sums + (group * job.tiles_m + tile_m) * kTileRows);
}

}  // namespace qao::cpu
