// What the AMX kernels of int8 share. `static`: see numeric.h.
#pragma once

#include "cpu/mm_job.h"
#include "cpu/x86/amx/output.h"
#include "cpu/x86/amx/tiles.h"
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

}  // namespace qao::cpu
