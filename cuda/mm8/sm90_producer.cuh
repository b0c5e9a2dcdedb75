// What a Hopper kernel is made for, which tile a CTA computes, and the producer warps that feed it.
#pragma once

#include <type_traits>

#include "common/convert.cuh"
#include "common/ptx.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/layout.h"
#include "mm8/sm90_kernels.h"
#include "mm8/sm90_operand.cuh"
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
// per token, a scale of x or a sum of it.
template <typename T_, Format weight, Fold fold, bool columns, int tokens>
struct Kernel {
  using T = T_;
  using Product = std::conditional_t<std::is_same_v<T, int8_t>, int, float>;
  static constexpr Format kWeight = weight;
  static constexpr Fold kFold = fold;
  static constexpr bool kFolds = fold != Fold::kNone, kColumns = columns;
  static constexpr bool kFloatX = !std::is_same_v<T, int8_t> && !std::is_same_v<T, wgmma::E4m3>;
  static constexpr bool kPacked = weight == Format::kInt4, kFromRegisters = kFloatX || kPacked;
  static constexpr bool kScalesOperand = kPacked && kFloatX && !kFolds;  // int4 is multiplied by its scales in T
  static constexpr int kTileK = kFloatX ? 64 : 128, kTokens = tokens, kTilesM = tokens / 8;
  static constexpr Traits kTraits{kFloatX, kPacked, columns, kFolds};
  static constexpr Stage kStage{kTraits, tokens};
  // A CTA starts with 168 or 80 registers a thread; consumers take what the producers give up, and no more.
  static constexpr int kCtasPerSm = kTraits.ctas_per_sm(tokens);
  static constexpr int kProducerRegisters = (kCtasPerSm == 1 ? 40 : 32) + (kScalesOperand ? 16 : 0);
  static constexpr int kConsumerRegisters = (kCtasPerSm == 1 ? 232 : 104) - (kScalesOperand ? 8 : 0);
  static_assert(2 * tokens * kPaddedN * 4 <= kStage.epilogue, "a tile of split K overlays the ring");
  static constexpr int kPanel = 2048 / tokens;  // token tiles
};

// The ring of stages, its mbarriers, three for each stage, and where a role has got to.
template <typename K>
struct Ring {
  uint32_t data;  // shared address
  int stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t address() const { return data + stage * K::kStage.bytes; }
  __device__ __forceinline__ uint32_t arrived() const { return data + K::kStage.barriers + stage * 8; }
  __device__ __forceinline__ uint32_t released() const { return arrived() + kBarrierBytes; }
  __device__ __forceinline__ uint32_t scales_arrived() const { return arrived() + 2 * kBarrierBytes; }
  __device__ __forceinline__ void advance() {
    if (++stage == K::kStage.count) stage = 0, parity ^= 1;
  }
};

// Consumer warpgroups that have rows of W.
__device__ __forceinline__ int warpgroups(const Params& p) { return p.tile_rows > kTileN / 2 ? 2 : 1; }

// One tile of y, and the K-tiles this CTA walks for it, counted through all parts of x. Tiles come in panels of 2048
// tokens, inside a panel all token tiles of one row tile together: weights are read from L2 within a panel, x stays
// there between row tiles.
struct Place {
  int row_block, token_block, begin, end;
};
// a / b, which takes long, where that is not plain: what comes before a CTA's first copy is part of every call.
__device__ __forceinline__ int quotient(int a, int b) { return a < b ? 0 : b == 1 ? a : a / b; }
template <typename K>
__device__ __forceinline__ Place place(const Params& p, int tile) {
  const int row_clusters = (p.row_blocks + p.share - 1) >> (p.share - 1);
  const int panel = quotient(tile, K::kPanel * row_clusters), inside = tile - panel * K::kPanel * row_clusters;
  const int width = min(K::kPanel, p.token_blocks - panel * K::kPanel);
  const int rank = ptx::cluster_rank(), part = rank >> (p.share - 1), steps = p.parts * p.k_tiles;
  const int row_cluster = quotient(inside, width);
  return {row_cluster * p.share + (rank & (p.share - 1)), panel * K::kPanel + inside - row_cluster * width,
          quotient(steps * part, p.split_k), quotient(steps * (part + 1), p.split_k)};
}
template <typename K, typename Work>
__device__ __forceinline__ void for_each_tile(const Params& p, const Work& work) {
  const int tiles = ((p.row_blocks + p.share - 1) >> (p.share - 1)) * p.token_blocks;
  for (int tile = ptx::cluster_index(); tile < tiles; tile += ptx::cluster_count()) work(place<K>(p, tile));
}

// K-tile `at` is the last of its group.
__device__ __forceinline__ bool ends_group(const Params& p, int at) {
  return at + 1 == p.k_tiles || ((at + 1) & ((1 << p.fold_shift) - 1)) == 0;
}
__device__ __forceinline__ int first_group(const Params& p, int at) {
  return p.groups_per_tile > 1 ? at * p.groups_per_tile : at >> p.fold_shift;
}

// Brings the CTA's first K-tiles of W into L2, a lane each.
template <typename K>
__device__ __forceinline__ void prefetch_weight(const Params& p, const TensorMaps& maps) {
  constexpr int kPackedTiles = K::kTileK / int4_mm::kTileK;
  const int row_tiles = p.tile_rows / int4_mm::kTileN;
  const Place at = place<K>(p, ptx::cluster_index());
  const int lane = threadIdx.x % 32, i = at.begin + lane, k_tile = i % p.k_tiles;
  if (lane >= p.prefetch_tiles || i >= at.end) return;
  if constexpr (K::kPacked) {
    tma::prefetch_3d(&maps.weight, 0, kPackedTiles * k_tile, at.row_block * row_tiles);
    tma::prefetch_3d(&maps.scales, 0, first_group(p, k_tile), at.row_block * row_tiles);
  } else {
    tma::prefetch_3d(&maps.weight, k_tile * K::kTileK, 0, at.row_block * p.tile_rows);
  }
}

// One warp: fills stage after stage. What lies outside a tensor arrives as zero. All lanes walk along, so that what
// they count stays in uniform registers, where the copy engine wants it; one of them issues.
template <typename K>
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, Ring<K> ring) {
  constexpr int kPackedTiles = K::kTileK / int4_mm::kTileK;
  const int row_tiles = p.tile_rows / int4_mm::kTileN;
  const int scale_bytes = K::kPacked ? row_tiles * p.groups_per_tile * p.group_bytes : 0;
  const int bytes = p.x_rows * 128 + K::kStage.weight / kTileN * p.tile_rows + (K::kScalesOperand ? 0 : scale_bytes);
  for_each_tile<K>(p, [&](const Place& at) {
    int part = 0, k_tile = at.begin;
    while (k_tile >= p.k_tiles) k_tile -= p.k_tiles, ++part;
    const int rank = ptx::cluster_rank(), first = (rank & (p.share - 1)) * (K::kTokens / 2),
              token0 = at.token_block * K::kTokens;
    ptx::wait_for_previous_kernel();
#pragma unroll 1
    for (int i = at.begin; i < at.end; ++i) {
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      const uint32_t x = ring.address(), weight = x + K::kStage.x, barrier = ring.arrived();
      if (ptx::elect_one()) {
        tma::barrier_expect(barrier, bytes);
        if (p.share > 1) {
          tma::load_3d_multicast(x + first * 128, &maps.x, k_tile * K::kTileK, part, token0 + first, barrier,
                                 0b11 << (rank & ~1));
        } else {
          tma::load_3d(x, &maps.x, k_tile * K::kTileK, part, token0, barrier);
        }
        if constexpr (K::kPacked) {
          tma::load_3d(weight, &maps.weight, 0, kPackedTiles * k_tile, at.row_block * row_tiles, barrier);
          const uint32_t scales_barrier = K::kScalesOperand ? ring.scales_arrived() : barrier;
          if (K::kScalesOperand) tma::barrier_expect(scales_barrier, scale_bytes);
          tma::load_3d(weight + K::kStage.weight, &maps.scales, 0, first_group(p, k_tile), at.row_block * row_tiles,
                       scales_barrier);
        } else {
          tma::load_3d(weight, &maps.weight, k_tile * K::kTileK, 0, at.row_block * p.tile_rows, barrier);
        }
      }
      ring.advance();
      if (++k_tile == p.k_tiles) k_tile = 0, ++part;
    }
  });
  ptx::launch_dependents();  // what is left is to multiply what lies in the ring
}

constexpr int kHelperThreads = kProducerThreads - 32;

// Three warps, K-tiles by turns: the scales of an int4 W as its operand needs them.
template <typename K>
__device__ __forceinline__ void make_scales(const Params& p, Ring<K> ring) {
  const int lane = threadIdx.x % 32;
  int turn = threadIdx.x % kProducerThreads / 32 - 1;
  for_each_tile<K>(p, [&](const Place& place) {
#pragma unroll 1
    for (int at = place.begin; at < place.end; ++at, ring.advance()) {
      turn = turn == 0 ? kHelperThreads / 32 - 1 : turn - 1;
      if (turn != 0) continue;
      // A warp may be a whole ring ahead of a slow copy, and must not take the parity of two rounds ago for this one's.
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      tma::barrier_wait(ring.scales_arrived(), ring.parity);
      const uint32_t from = ring.address() + K::kStage.x + K::kStage.weight, to = from + K::kStage.scales;
      for (int group = 0; group < p.groups_per_tile; ++group) {
#pragma unroll
        for (int row = lane; row < kTileN; row += 32) {
          const uint32_t tile = from + (row / int4_mm::kTileN * p.groups_per_tile + group) * p.group_bytes;
          const int index = row % int4_mm::kTileN;
          const float scale = load_shared_float(tile, index, p.scale_dtype) * p.scale_factor;
          const float zero = p.has_zeros ? load_shared_float(tile, index + int4_mm::kTileN, p.scale_dtype) : 8.0f;
          const RowScale made = row_scale<typename K::T>(scale, zero);
          ptx::store_shared_8(to + (group * kTileN + row) * kRowScaleBytes, {made.main, made.rest});
        }
      }
      __syncwarp();
      if (lane == 0) tma::barrier_arrive(ring.arrived());
    }
  });
}

// Three warps: the values per token.
template <typename K>
__device__ __forceinline__ void produce_columns(const Params& p, Ring<K> ring) {
  for_each_tile<K>(p, [&](const Place& place) {
    const int64_t token0 = static_cast<int64_t>(place.token_block) * K::kTokens;
    ptx::wait_for_previous_kernel();
    for (int at = place.begin; at < place.end; ++at) {
      tma::barrier_wait(ring.released(), ring.parity ^ 1);
      const uint32_t to = ring.address() + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const int group = first_group(p, at);
      const bool ends = ends_group(p, at);  // its sum of x comes off once; until then it counts as zero
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

}  // namespace qao::mm8::sm90
