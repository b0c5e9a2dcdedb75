// Producer warps: TMA loads of x and W, conversion of scales, and values per token.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "gemm/sm90_ws/dequant_fp4.cuh"
#include "gemm/sm90_ws/dequant_int4.cuh"
#include "gemm/sm90_ws/dequant_two_level.cuh"
#include "gemm/sm90_ws/params.h"
#include "gemm/sm90_ws/pipeline.cuh"
#include "gemm/sm90_ws/tile_scheduler.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm90_ws {

// Whether k-tile `at` is the last of its group.
__device__ __forceinline__ bool ends_group(const Params& p, int at) {
  return at + 1 == p.k_tiles || ((at + 1) & ((1 << p.fold_shift) - 1)) == 0;
}
__device__ __forceinline__ int first_group(const Params& p, int at) {
  return p.groups_per_tile > 1 ? at * p.groups_per_tile : at >> p.fold_shift;
}

// TMA descriptors of W and its scales.
template <typename K>
__device__ __forceinline__ const CUtensorMap* weight_map(const typename K::Maps& maps, const Place& at) {
  if constexpr (K::kMerged) return &maps.of[at.weight].weight;
  return &maps.weight;
}
template <typename K>
__device__ __forceinline__ const CUtensorMap* scales_map(const typename K::Maps& maps, const Place& at) {
  if constexpr (K::kMerged) return &maps.of[at.weight].scales;
  return &maps.scales;
}

// Prefetches the CTA's first k-tiles of W into L2, one per lane.
template <typename K>
__device__ __forceinline__ void prefetch_weight(const Params& p, const typename K::Maps& maps, uint32_t shared) {
  constexpr int kPackedTiles = K::kTileK / int4::kTileK;
  const Place at = place<K>(p, shared, first_turn<K>(p));
  const int lane = threadIdx.x % 32, i = at.begin + lane, k_tile = i % p.k_tiles;
  if (lane >= p.prefetch_tiles || i >= at.end) return;
  if constexpr (K::kPacked) {
    tma::prefetch_3d(weight_map<K>(maps, at), 0, kPackedTiles * k_tile, weight_row<K>(p, at));
    tma::prefetch_3d(scales_map<K>(maps, at), 0, first_group(p, k_tile), weight_row<K>(p, at));
    if constexpr (K::kGated) {
      tma::prefetch_3d(&maps.of[1].weight, 0, kPackedTiles * k_tile, weight_row<K>(p, at));
      tma::prefetch_3d(&maps.of[1].scales, 0, first_group(p, k_tile), weight_row<K>(p, at));
    }
  } else {
    tma::prefetch_3d(weight_map<K>(maps, at), k_tile * K::kTileK, 0, weight_row<K>(p, at));
  }
}

// TMA boxes of x per stage: `count` boxes of `rows` tokens. Partial token tiles have smaller boxes, since TMA takes
// longer to zero-fill than to copy.
struct XCopies {
  const CUtensorMap* map;
  int rows, count;
};
template <typename K>
__device__ __forceinline__ XCopies x_copies(const Params& p, const TensorMaps& maps, const Place& at) {
  const auto left = static_cast<int>(last_token<K>(p, at) - first_token<K>(at));
  // The rows after an expert's belong to other experts.
  const bool whole = K::kGrouped ? 2 * left > K::kTokens && first_token<K>(at) + K::kTokens <= p.m : left >= K::kTokens;
  if (whole) return {&maps.x, K::kTokens / K::kSharers, K::kSharers};
  if constexpr (!K::kGrouped) return {&maps.last_x, p.last_x_rows, K::kSharers};
  return {&maps.last_x, K::kEndRows, (left + K::kEndRows - 1) / K::kEndRows};
}

// Producer warp: fills the stages. Out-of-bounds elements are zero. All lanes run the loop, so that the TMA coordinates
// stay in uniform registers; an elected lane issues.
template <typename K>
__device__ __forceinline__ void produce(const Params& p, const typename K::Maps& maps, Ring<K> ring) {
  constexpr int kPackedTiles = K::kTileK / int4::kTileK;
  const int row_tiles = p.tile_rows / int4::kTileN;
  const int scale_bytes = K::kPacked ? row_tiles * p.groups_per_tile * p.group_bytes : 0;
  const int weight_bytes = K::kStage.weight / K::kTile.rows * p.tile_rows + (K::kMakesScales ? 0 : scale_bytes);
  for_each_tile<K>(p, ring.data, [&](const Place& at) {
    int part = 0, k_tile = at.begin;
    while (k_tile >= p.k_tiles) k_tile -= p.k_tiles, ++part;
    const int token0 = static_cast<int>(first_token<K>(at)), row0 = weight_row<K>(p, at);
    const CUtensorMap *const weights = weight_map<K>(maps, at), *const scales = scales_map<K>(maps, at);
    const XCopies copies = x_copies<K>(p, maps, at);
    const int bytes = copies.count * copies.rows * K::kAtoms * 128 + weight_bytes;
    ptx::wait_for_previous_kernel();
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i) {
      // Wait for a free stage
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      const uint32_t x = ring.address(), weight = x + K::kStage.x, barrier = ring.arrived();
      if (ptx::elect_one()) {
        if constexpr (K::kPacked) {  // scales first: they have the longest latency until WGMMA
          if (!K::kRowScales || p.groups > 1) {
            const uint32_t scales_barrier = K::kMakesScales ? ring.scales_arrived() : barrier;
            tma::barrier_expect(scales_barrier, K::kMakesScales ? scale_bytes : bytes);
            tma::load_3d(weight + K::kStage.weight, scales, 0, first_group(p, k_tile), row0, scales_barrier);
            if constexpr (K::kGated) {
              tma::load_3d(weight + K::kStage.weight + scale_bytes / 2, &maps.of[1].scales, 0, first_group(p, k_tile),
                           row0, scales_barrier);
            }
          }
          if (K::kMakesScales) tma::barrier_expect(barrier, bytes);
          tma::load_3d(weight, weights, 0, kPackedTiles * k_tile, row0, barrier);
          if constexpr (K::kGated) {
            tma::load_3d(weight + K::kStage.weight / 2, &maps.of[1].weight, 0, kPackedTiles * k_tile, row0, barrier);
          }
        } else {
          tma::barrier_expect(barrier, bytes);
          tma::load_3d(weight, weights, k_tile * K::kTileK, 0, row0, barrier);
        }
        // Issue the loads of x
#pragma unroll
        for (int atom = 0; atom < K::kAtoms; ++atom) {
          const uint32_t to = x + atom * K::kTokens * 128;
          const int column = k_tile * K::kTileK + atom * K::kAtomK;
          // Ping-pong: the CTAs of the cluster alternate, and multicast to both.
          for (int copy = K::kPingPong ? ptx::cluster_rank() : 0; copy < copies.count; copy += K::kSharers) {
            const int first = copy * copies.rows;
            if constexpr (K::kPingPong) {
              tma::load_3d_to_all(to + first * 128, copies.map, column, part, token0 + first, barrier,
                                  kPingPongCluster);
            } else {
              tma::load_3d(to + first * 128, copies.map, column, part, token0 + first, barrier);
            }
          }
        }
      }
      ring.advance();
      if (++k_tile == p.k_tiles) k_tile = 0, ++part;
    }
  });
  ptx::launch_dependents();  // the remaining work needs the loaded stages only
}

constexpr int kHelperThreads = kProducerThreads - 32;

// Converts the scales of one group of a tile's rows, two pairs of rows per lane. Returns whether any scale has a rest.
template <typename T, int rows, DType dtype>
__device__ __forceinline__ bool make_scales(const Params& p, int lane, uint32_t from, uint32_t to) {
  constexpr int kLanes = 4;  // lanes per row tile
  const uint32_t tile = from + lane / kLanes * (p.groups_per_tile * p.group_bytes) + lane % kLanes * 2 * size_of(dtype);
  RowScale made[2][2];  // rows g and g + 8
  const auto make = [&](auto of_high) {
    constexpr bool high = decltype(of_high)::value;
    const uint32_t at = tile + high * 8 * size_of(dtype);
    const float2 scales = load_shared_float2<dtype>(at);
    float2 zeros = {8, 8};
    if (p.has_zeros) zeros = load_shared_float2<dtype>(at + int4::kTileN * size_of(dtype));
    made[0][high] = row_scale<T, high>(scales.x * p.scale_factor, zeros.x);
    made[1][high] = row_scale<T, high>(scales.y * p.scale_factor, zeros.y);
  };
  make(std::bool_constant<false>{});
  make(std::bool_constant<true>{});
  const uint32_t rest = made[0][0].rest | made[0][1].rest | made[1][0].rest | made[1][1].rest;
  to += lane * 2 * 2 * 4;
  ptx::store_shared_16(to, {made[0][0].main, made[0][1].main, made[1][0].main, made[1][1].main});
  ptx::store_shared_16(to + rows * kRestBytes, {made[0][0].rest, made[0][1].rest, made[1][0].rest, made[1][1].rest});
  return (rest & 0x7FFF) != 0;
}
// All groups of a k-tile.
template <typename K, DType dtype>
__device__ __forceinline__ bool make_all_scales(const Params& p, uint32_t stage) {
  uint32_t from = stage + K::kStage.x + K::kStage.weight, to = from + K::kStage.scales;
  bool rest = false;
#pragma unroll 1
  for (int group = 0; group < p.groups_per_tile; ++group) {
    for (int lane = threadIdx.x % 32; lane < p.tile_rows / 4; lane += 32) {
      rest |= make_scales<typename K::T, K::kTile.rows, dtype>(p, lane, from, to);
    }
    from += p.group_bytes, to += K::kTile.rows * kRowScaleBytes;
  }
  return __any_sync(0xFFFFFFFFu, rest);
}

// Three helper warps convert scales, on alternating k-tiles.
template <typename K>
__device__ __forceinline__ void make_scales(const Params& p, Ring<K> ring) {
  constexpr int kWarps = kHelperThreads / 32;
  static_assert(K::kStage.count >= kWarps);
  int ahead = threadIdx.x % kProducerThreads / 32 - 1;  // k-tiles of the other warps before this warp's next
  ring.advance(ahead);
  for_each_tile<K>(p, ring.data, [&](const Place& place) {
    int at = place.begin + ahead;
#pragma unroll 1
    for (; at < place.end; at += kWarps, ring.advance(kWarps)) {
      // A warp may run a full ring ahead of a slow load, and must not mistake an older phase of equal parity for this
      // one.
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      tma::barrier_wait(ring.scales_arrived(), ring.parity);
      if constexpr (K::kWeight == Format::kFp4) {
        const uint32_t from = ring.address() + K::kStage.x + K::kStage.weight;
        make_fp4_scales<K::kTile.rows>(p, threadIdx.x % 32, from, from + K::kStage.scales);
      } else {
        const bool rest = p.scale_dtype == DType::kBFloat16  ? make_all_scales<K, DType::kBFloat16>(p, ring.address())
                          : p.scale_dtype == DType::kFloat16 ? make_all_scales<K, DType::kFloat16>(p, ring.address())
                                                             : make_all_scales<K, DType::kFloat32>(p, ring.address());
        if (threadIdx.x % 32 == 0) ptx::store_shared_4(ring.rest(), rest);
      }
      tma::barrier_arrive(ring.arrived());  // every lane arrives for its own stores
    }
    ahead = at - place.end;
  });
}

// Three helper warps load the values per token.
template <typename K>
__device__ __forceinline__ void produce_columns(const Params& p, Ring<K> ring) {
  for_each_tile<K>(p, ring.data, [&](const Place& place) {
    const int64_t token0 = first_token<K>(place);
    ptx::wait_for_previous_kernel();
    for (int at = place.begin; at < place.end; ++at) {
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      const uint32_t to = ring.address() + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const int group = first_group(p, at);
      const bool ends = ends_group(p, at);  // the sum of x is subtracted once per group; before, it counts as zero
      for (int i = threadIdx.x % kProducerThreads - 32; i < p.groups_per_tile * K::kTokens; i += kHelperThreads) {
        const int64_t token = token0 + i % K::kTokens;
        const int g = group + i / K::kTokens;
        const bool exists = ends && at < p.column_tiles && token < p.m && g < p.groups;
        ptx::cp_async_4(to + i * 4, exists ? p.columns + token * p.groups + g : p.columns, exists);
      }
      tma::barrier_arrive_after_copies(ring.arrived());
      ring.advance();
    }
  });
}

}  // namespace qao::gemm::sm90_ws
