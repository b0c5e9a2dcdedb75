// What a Hopper kernel is made for, which tile a CTA computes, and the producer warps that feed it.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/tma.cuh"
#include "int4_mm/sm90_kernels.h"
#include "int4_mm/sm90_operand.cuh"

namespace qao::int4_mm::sm90 {

// T: what the tensor cores multiply. `exact`: x is a float32 in bfloat16 parts, so W is whole numbers and each K-tile's
// products move to float32 sums, scaled there: sum += scale (product - (zero - 8) x_sum).
template <typename T_, bool exact, int tokens>
struct Kernel {
  using T = T_;
  using Raw = std::conditional_t<exact, ExactOperand, ScaledOperand<T>>;
  static constexpr bool kExact = exact, kSplits = splits(tokens);
  static constexpr int kTokens = tokens, kTilesM = tokens / 8;
  static constexpr Stage kStage{exact, tokens};
  // A CTA starts with 168 or 80 registers a thread; consumers take what the producers give up, and no more.
  static constexpr int kCtasPerSm = ctas_per_sm(tokens, exact);
  static constexpr int kProducerRegisters = kCtasPerSm == 1 ? 40 : 32, kConsumerRegisters = kCtasPerSm == 1 ? 232 : 104;
  static constexpr int kPanel = 2048 / tokens;  // token tiles
};

// The mbarriers of the ring, some for each stage, and where a role has got to.
struct Ring {
  uint32_t data, arrived, released, scales_arrived;  // shared addresses
  int stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t arrived_now() const { return arrived + stage * 8; }
  __device__ __forceinline__ uint32_t released_now() const { return released + stage * 8; }
  __device__ __forceinline__ uint32_t scales_arrived_now() const { return scales_arrived + stage * 8; }
  template <typename K>
  __device__ __forceinline__ uint32_t address() const {
    return data + stage * K::kStage.bytes;
  }
  template <typename K>
  __device__ __forceinline__ void advance() {
    if (++stage == K::kStage.count) stage = 0, parity ^= 1;
  }
};

// One tile of y, and the K-tiles this CTA walks for it, counted through all parts of x. Tiles come in panels of 2048
// tokens, inside a panel all token tiles of one row tile together: weights are read from L2 within a panel, x stays
// there between row tiles.
struct Place {
  int row_block, token_block, begin, end;
};
template <typename K>
__device__ __forceinline__ Place place(const Params& p, int tile) {
  const int row_clusters = (p.row_blocks + p.share - 1) / p.share;
  const int panel = tile / (K::kPanel * row_clusters), inside = tile - panel * K::kPanel * row_clusters;
  const int width = min(K::kPanel, p.token_blocks - panel * K::kPanel);
  const int rank = p.split_k > 1 ? ptx::cluster_rank() : 0, steps = p.parts * p.k_tiles;
  const int row_block = p.share > 1 ? inside / width * p.share + ptx::cluster_rank() : inside / width;
  return {row_block, panel * K::kPanel + inside % width, static_cast<int>(int64_t{steps} * rank / p.split_k),
          static_cast<int>(int64_t{steps} * (rank + 1) / p.split_k)};
}
template <typename K, typename Work>
__device__ __forceinline__ void for_each_tile(const Params& p, const Work& work) {
  const int tiles = (p.row_blocks + p.share - 1) / p.share * p.token_blocks;
  const int cluster = max(p.share, p.split_k), clusters = gridDim.x / cluster;
  for (int tile = blockIdx.x / cluster; tile < tiles; tile += clusters) work(place<K>(p, tile));
}

// K-tile `at` is the last of its group.
__device__ __forceinline__ bool ends_group(const Params& p, int at) {
  return at + 1 == p.k_tiles || ((at + 1) & ((1 << p.group_shift) - 1)) == 0;
}
__device__ __forceinline__ int first_group(const Params& p, int at) {
  return p.groups_per_tile > 1 ? at * p.groups_per_tile : at >> p.group_shift;
}

// One warp: fills stage after stage. What lies outside a tensor arrives as zero. All lanes walk along, so that what
// they count stays in uniform registers, where the copy engine wants it; one of them issues.
template <typename K>
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, Ring ring) {
  constexpr int kRowTiles = kRows / kTileN;
  const int scale_bytes = kRowTiles * p.groups_per_tile * p.group_bytes;
  const int bytes = K::kStage.x + K::kStage.weight + (K::kExact ? scale_bytes : 0);
  for_each_tile<K>(p, [&](const Place& at) {
    int part = 0, k_tile = at.begin;
    while (k_tile >= p.k_tiles) k_tile -= p.k_tiles, ++part;
    const int first = p.share > 1 ? ptx::cluster_rank() * K::kTokens / 2 : 0, token0 = at.token_block * K::kTokens;
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i) {
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      const uint32_t x = ring.address<K>(), weight = x + K::kStage.x, barrier = ring.arrived_now();
      if (ptx::elect_one()) {
        tma::barrier_expect(barrier, bytes);
        if (p.share > 1) {
          tma::load_3d_multicast(x + first * 128, &maps.x, k_tile * kTileK, part, token0 + first, barrier, 0b11);
        } else {
          tma::load_3d(x, &maps.x, k_tile * kTileK, part, token0, barrier);
        }
        tma::load_3d(weight, &maps.weight, 0, k_tile, at.row_block * kRowTiles, barrier);
        const uint32_t scales_barrier = K::kExact ? barrier : ring.scales_arrived_now();
        if (!K::kExact) tma::barrier_expect(scales_barrier, scale_bytes);
        tma::load_3d(weight + K::kStage.weight, &maps.scales, 0, first_group(p, k_tile), at.row_block * kRowTiles,
                     scales_barrier);
      }
      ring.advance<K>();
      if (++k_tile == p.k_tiles) k_tile = 0, ++part;
    }
  });
}

constexpr int kHelperThreads = kProducerThreads - 32;

// Three warps, K-tiles by turns: scales as the operand needs them.
template <typename K>
__device__ __forceinline__ void make_scales(const Params& p, Ring ring) {
  const int lane = threadIdx.x % 32;
  int turn = threadIdx.x % kProducerThreads / 32 - 1;
  for_each_tile<K>(p, [&](const Place& place) {
#pragma unroll 1
    for (int at = place.begin; at < place.end; ++at, ring.advance<K>()) {
      turn = turn == 0 ? kHelperThreads / 32 - 1 : turn - 1;
      if (turn != 0) continue;
      // A warp may be a whole ring ahead of a slow copy, and must not take the parity of two rounds ago for this one's.
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      tma::barrier_wait(ring.scales_arrived_now(), ring.parity);
      const uint32_t from = ring.address<K>() + K::kStage.x + K::kStage.weight, to = from + K::kStage.scales;
      for (int group = 0; group < p.groups_per_tile; ++group) {
#pragma unroll
        for (int row = lane; row < kRows; row += 32) {
          const uint32_t tile = from + (row / kTileN * p.groups_per_tile + group) * p.group_bytes;
          const int index = row % kTileN;
          const float scale = load_shared_float(tile, index, p.scale_dtype) * p.scale_factor;
          const float zero = p.has_zeros ? load_shared_float(tile, index + kTileN, p.scale_dtype) : kSymmetricZero;
          const RowScale made = row_scale<typename K::T>(scale, zero);
          ptx::store_shared_8(to + (group * kRows + row) * kRowScaleBytes, {made.main, made.rest});
        }
      }
      __syncwarp();
      if (lane == 0) tma::barrier_arrive(ring.arrived_now());
    }
  });
}

// Three warps: sums of x for the zero points. They come off with the last K-tile of a group in the first part of x;
// until then they count as zero.
template <typename K>
__device__ __forceinline__ void fetch_sums(const Params& p, Ring ring) {
  for_each_tile<K>(p, [&](const Place& place) {
    const int64_t token0 = static_cast<int64_t>(place.token_block) * K::kTokens;
    for (int at = place.begin; at < place.end; ++at) {
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      const uint32_t to = ring.address<K>() + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const int group = first_group(p, at);
      const bool ends = ends_group(p, at);
      for (int i = threadIdx.x % kProducerThreads - 32; i < p.groups_per_tile * K::kTokens; i += kHelperThreads) {
        const int64_t token = token0 + i % K::kTokens;
        const int g = group + i / K::kTokens;
        const bool exists = ends && at < p.sum_tiles && token < p.m && g < p.groups;
        ptx::cp_async_4(to + i * 4, exists ? p.x_sums + token * p.groups + g : p.x_sums, exists);
      }
      tma::barrier_arrive_after_copies(ring.arrived_now());
      ring.advance<K>();
    }
  });
}

}  // namespace qao::int4_mm::sm90
