// The whole numbers of RowScaledOperand from the scales of a K-tile: scale / scale of the row.
#pragma once

#include "common/convert.cuh"
#include "int4/layout.h"
#include "mm/wgmma/producer.cuh"

namespace qao::mm::wgmma {

// The nearest whole number of a small one: the last bits of a float32 to which so much was added.
__device__ __forceinline__ uint32_t nearest_whole(float value) {
  constexpr int kMagic = 0x4B400000;  // 1.5 * 2^23
  return static_cast<uint32_t>(__float_as_int(value + __int_as_float(kMagic)) - kMagic);
}

// Three warps, K-tiles by turns, a lane a few pairs of rows g and g + 8: into the half of the stage's scales that zero
// points do not need, [step of 32 columns][row tile][g][g, g + 8].
template <typename K>
struct WholeScales {
  static constexpr int kPairs = K::kTile.rows / 2 / 32;

  const Params& p;
  const int lane = threadIdx.x % 32;
  float inverse[kPairs][2];  // of the rows' scales

  // `first`: of the tile's expert among the rows of all.
  __device__ __forceinline__ void start(int row0, int first) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
#pragma unroll
      for (int high = 0; high < 2; ++high) {
        const int pair = lane + i * 32, row = row0 + pair / 8 * int4::kTileN + pair % 8 + high * 8;
        inverse[i][high] = __fdividef(1.0f, p.row_scales[first + min(row, p.n - 1)]);
      }
    }
  }
  template <DType dtype>
  __device__ __forceinline__ void make(uint32_t stage) const {
    const uint32_t from = stage + K::kStage.x + K::kStage.weight, to = from + K::kStage.scales / 2;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const int pair = lane + i * 32;
      const uint32_t rows = from + pair / 8 * (p.groups_per_tile * p.group_bytes) + pair % 8 * size_of(dtype);
#pragma unroll
      for (int step = 0; step < kAtomSteps; ++step) {
        const uint32_t at = rows + step * p.groups_per_tile / kAtomSteps * p.group_bytes;
        const uint2 whole = {nearest_whole(load_shared_float<dtype>(at) * inverse[i][0]),
                             nearest_whole(load_shared_float<dtype>(at + 8 * size_of(dtype)) * inverse[i][1])};
        ptx::store_shared_8(to + step * K::kTile.rows * 4 + pair * 8, whole);
      }
    }
  }
};

template <typename K>
__device__ __forceinline__ void make_whole_scales(const Params& p, Ring<K> ring) {
  constexpr int kWarps = kHelperThreads / 32;
  static_assert(K::kStage.count >= kWarps);
  int ahead = threadIdx.x % kProducerThreads / 32 - 1;  // K-tiles of the other warps before this one's next
  ring.advance(ahead);
  WholeScales<K> scales{p};
  ptx::wait_for_previous_kernel();
  for_each_tile<K>(p, ring.data, [&](const Place& place) {
    scales.start(place.row_block * p.tile_rows, of_expert<K>(place, p.n));
    int at = place.begin + ahead;
#pragma unroll 1
    for (; at < place.end; at += kWarps, ring.advance(kWarps)) {
      // See make_scales().
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      tma::barrier_wait(ring.scales_arrived(), ring.parity);
      if (p.scale_dtype == DType::kBFloat16) {
        scales.template make<DType::kBFloat16>(ring.address());
      } else if (p.scale_dtype == DType::kFloat16) {
        scales.template make<DType::kFloat16>(ring.address());
      } else {
        scales.template make<DType::kFloat32>(ring.address());
      }
      tma::barrier_arrive(ring.arrived());  // every lane for what it stored
    }
    ahead = at - place.end;
  });
}

}  // namespace qao::mm::wgmma
