// Group parameters of 8-bit products, which helper warps prepare for the consumers.
#pragma once

#include "common/centred.cuh"
#include "common/convert.cuh"
#include "gemm/sm90_ws/load.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

// Factors of RowScaledOperand, computed from the scales of a k-tile: scale / row scale. A lane handles a few pairs of
// rows g and g + 8. Writes to the half of the stage's scales that symmetric weights leave unused, [step of 32
// columns][row tile][g][g, g + 8].
template <typename K>
struct GroupFactors {
  static constexpr int kPairs = K::kTile.rows / 2 / 32;

  const Params& p;
  const int lane = threadIdx.x % 32;
  float inverse[kPairs][2];  // of the row scales

  // `first`: first row of the tile's expert.
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
        const float low = load_shared_float<dtype>(at), high = load_shared_float<dtype>(at + 8 * size_of(dtype));
        const uint2 factors = {group_factor<typename K::T, false>(low * inverse[i][0]),
                               group_factor<typename K::T, true>(high * inverse[i][1])};
        ptx::store_shared_8(to + step * K::kTile.rows * 4 + pair * 8, factors);
      }
    }
  }
};

// Scales, and the codes of integer zero points for e4m3 (centred::four_codes), [group][row tile][g][scales of g and g +
// 8, codes of both].
template <typename K>
struct PreparedGroups {
  static constexpr int kPairs = K::kTile.rows / 2;

  const Params& p;
  const int lane = threadIdx.x % 32;

  __device__ __forceinline__ void start(int, int) {}
  template <DType dtype>
  __device__ __forceinline__ void make(uint32_t stage) const {
    uint32_t from = stage + K::kStage.x + K::kStage.weight, to = from + K::kStage.scales;
#pragma unroll 1
    for (int group = 0; group < p.groups_per_tile; ++group, from += p.group_bytes, to += kPairs * kPreparedBytes) {
#pragma unroll 1  // for 32 registers
      for (int pair = lane; pair < kPairs; pair += 32) {
        const uint32_t at = from + pair / 8 * (p.groups_per_tile * p.group_bytes) + pair % 8 * size_of(dtype);
        const auto read = [&](int row) { return load_shared_float<dtype>(at + row * size_of(dtype)); };
        const uint32_t pair_to = to + pair * kPreparedBytes;
        ptx::store_shared_8(pair_to, {__float_as_uint(read(0)), __float_as_uint(read(8))});
        if constexpr (K::kCentred) {
          uint2 codes = {0x08080808, 0x08080808};
          if (p.has_zeros) {
            codes = {centred::four_codes(read(int4::kTileN)), centred::four_codes(read(int4::kTileN + 8))};
          }
          ptx::store_shared_8(pair_to + 8, codes);
        }
      }
    }
  }
};

// Three warps on alternating k-tiles.
template <typename K, typename Parameters>
__device__ __forceinline__ void make_parameters(const Params& p, Ring<K> ring) {
  constexpr int kWarps = kHelperThreads / 32;
  static_assert(K::kStage.count >= kWarps);
  int ahead = threadIdx.x % kProducerThreads / 32 - 1;  // k-tiles of the other warps before this warp's next
  ring.advance(ahead);
  Parameters parameters{p};
  ptx::wait_for_previous_kernel();
  for_each_tile<K>(p, ring.data, [&](const Place& place) {
    parameters.start(place.row_block * p.tile_rows, of_expert<K>(place, p.n));
    int at = place.begin + ahead;
#pragma unroll 1
    for (; at < place.end; at += kWarps, ring.advance(kWarps)) {
      // See make_scales().
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      tma::barrier_wait(ring.scales_arrived(), ring.parity);
      if (p.scale_dtype == DType::kBFloat16) {
        parameters.template make<DType::kBFloat16>(ring.address());
      } else if (p.scale_dtype == DType::kFloat16) {
        parameters.template make<DType::kFloat16>(ring.address());
      } else {
        parameters.template make<DType::kFloat32>(ring.address());
      }
      tma::barrier_arrive(ring.arrived());  // every lane arrives for its own stores
    }
    ahead = at - place.end;
  });
}
template <typename K>
__device__ __forceinline__ void make_group_factors(const Params& p, Ring<K> ring) {
  make_parameters<K, GroupFactors<K>>(p, ring);
}
template <typename K>
__device__ __forceinline__ void prepare_groups(const Params& p, Ring<K> ring) {
  make_parameters<K, PreparedGroups<K>>(p, ring);
}

}  // namespace qao::gemm::sm90_ws
