// What a Hopper kernel is made for, which tile a CTA computes, and the producer warps that feed it.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/layout.h"
#include "mm8/sm90_kernels.h"
#include "mm8/sm90_tile.h"

namespace qao::mm8::sm90 {

// What happens to sums during the walk over K.
enum class Fold {
  kNone,     // nothing: scales wait for the epilogue
  kPromote,  // sums of e4m3 or of the parts of a float32 x, which the tensor cores cut short, move to float32 sums
  kBlock,    // scales of 128 x 128 blocks of W, and of 1 x 128 of an x of eight bits
  kGroup,    // scales of the groups of an int4 W
};

// T: what the tensor cores multiply, __nv_bfloat16, __half, int8_t or wgmma::E4m3. `columns`: the fold needs a value
// per token, a scale of x or a sum of it. `share`: CTAs of a cluster, for neighbouring row tiles, that fetch x
// together.
template <typename T_, Format weight, Fold fold, bool columns, int tokens, int share>
struct Kernel {
  using T = T_;
  using Product = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr Format kWeight = weight;
  static constexpr Fold kFold = fold;
  static constexpr bool kFolds = fold != Fold::kNone, kColumns = columns;
  static constexpr bool kFloatX = !std::is_same_v<T, int8_t> && !std::is_same_v<T, wgmma::E4m3>;
  static constexpr bool kPacked = weight == Format::kInt4, kFromRegisters = kFloatX || kPacked;
  static constexpr int kTileK = kFloatX ? 64 : 128, kTokens = tokens, kTilesM = tokens / 8, kShare = share;
  static constexpr Stage kStage{kFloatX, kPacked, columns, tokens};
  static constexpr int kPanel = 2048 / tokens;  // token tiles
};

// The mbarriers of the ring, one pair a stage, and where a role has got to.
struct Ring {
  uint32_t data, arrived, released;  // shared addresses
  int stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t arrived_now() const { return arrived + stage * 8; }
  __device__ __forceinline__ uint32_t released_now() const { return released + stage * 8; }
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
  const int row_clusters = (p.row_blocks + K::kShare - 1) / K::kShare;
  const int panel = tile / (K::kPanel * row_clusters), inside = tile - panel * K::kPanel * row_clusters;
  const int width = min(K::kPanel, p.token_blocks - panel * K::kPanel);
  const int rank = p.split_k > 1 ? ptx::cluster_rank() : 0, steps = p.parts * p.k_tiles;
  const int row_block = K::kShare > 1 ? inside / width * K::kShare + ptx::cluster_rank() : inside / width;
  return {row_block, panel * K::kPanel + inside % width, static_cast<int>(int64_t{steps} * rank / p.split_k),
          static_cast<int>(int64_t{steps} * (rank + 1) / p.split_k)};
}
template <typename K, typename Work>
__device__ __forceinline__ void for_each_tile(const Params& p, const Work& work) {
  const int tiles = (p.row_blocks + K::kShare - 1) / K::kShare * p.token_blocks;
  const int cluster = K::kShare > 1 ? K::kShare : p.split_k, clusters = gridDim.x / cluster;
  for (int tile = blockIdx.x / cluster; tile < tiles; tile += clusters) work(place<K>(p, tile));
}

// K-tile `at` is the last of its group.
__device__ __forceinline__ bool ends_group(const Params& p, int at) {
  return at + 1 == p.k_tiles || ((at + 1) & ((1 << p.fold_shift) - 1)) == 0;
}
__device__ __forceinline__ int first_group(const Params& p, int at) {
  return p.groups_per_tile > 1 ? at * p.groups_per_tile : at >> p.fold_shift;
}

// One thread: fills stage after stage. What lies outside a tensor arrives as zero.
template <typename K>
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, Ring ring) {
  const int row_tiles = kTileN / int4_mm::kTileN;
  const int bytes = K::kStage.x + K::kStage.weight + (K::kPacked ? row_tiles * p.groups_per_tile * p.group_bytes : 0);
  for_each_tile<K>(p, [&](const Place& at) {
    int part = at.begin / p.k_tiles, k_tile = at.begin % p.k_tiles;
    for (int i = at.begin; i < at.end; ++i) {
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      const uint32_t x = ring.address<K>(), weight = x + K::kStage.x, barrier = ring.arrived_now();
      tma::barrier_expect(barrier, bytes);
      const int token0 = at.token_block * K::kTokens;
      if constexpr (K::kShare > 1) {
        constexpr int kTokens = K::kTokens / K::kShare;
        const int first = ptx::cluster_rank() * kTokens;
        tma::load_3d_multicast(x + first * 128, &maps.x, k_tile * K::kTileK, part, token0 + first, barrier,
                               (1 << K::kShare) - 1);
      } else {
        tma::load_3d(x, &maps.x, k_tile * K::kTileK, part, token0, barrier);
      }
      if constexpr (K::kPacked) {
        tma::load_3d(weight, &maps.weight, 0, 2 * k_tile, at.row_block * row_tiles, barrier);
        tma::load_3d(weight + K::kStage.weight, &maps.scales, 0, first_group(p, k_tile), at.row_block * row_tiles,
                     barrier);
      } else {
        tma::load_3d(weight, &maps.weight, k_tile * K::kTileK, 0, at.row_block * kTileN, barrier);
      }
      ring.advance<K>();
      if (++k_tile == p.k_tiles) k_tile = 0, ++part;
    }
  });
}

constexpr int kColumnThreads = kProducerThreads - 32;

// Three warps: the values per token.
template <typename K>
__device__ __forceinline__ void produce_columns(const Params& p, Ring ring) {
  for_each_tile<K>(p, [&](const Place& place) {
    const int64_t token0 = static_cast<int64_t>(place.token_block) * K::kTokens;
    for (int at = place.begin; at < place.end; ++at) {
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      const uint32_t to = ring.address<K>() + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const int group = first_group(p, at);
      const bool ends = ends_group(p, at);  // its sum of x comes off once; until then it counts as zero
      for (int i = threadIdx.x % kProducerThreads - 32; i < p.groups_per_tile * K::kTokens; i += kColumnThreads) {
        const int64_t token = token0 + i % K::kTokens;
        const int g = group + i / K::kTokens;
        const bool exists = ends && token < p.m && g < p.groups;
        ptx::cp_async_4(to + i * 4, exists ? p.columns + token * p.groups + g : p.columns, exists);
      }
      tma::barrier_arrive_after_copies(ring.arrived_now());
      ring.advance<K>();
    }
  });
}

}  // namespace qao::mm8::sm90
