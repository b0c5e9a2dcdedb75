// The Hopper body: wgmma with W as the 64-row operand and x as the columns, both brought by the copy engine.
//
// A producer thread keeps a ring of K-tiles full, 128 bytes of each token and the matching columns of W. Two consumer
// warpgroups own 64 rows of W each. int8 x int8 and fp8 x fp8 multiply straight from shared memory; where W needs
// converting (int4, or 8 bits beside a float x) a warpgroup makes the next K-tile's operand in registers while the
// tensor cores work on the present one. CTAs are persistent: a tile's first K-tiles arrive during the last epilogue.
//
//            tokens        y[m][n] = x_scale[m] (row_scale[n] sum over k of W[n][k] x[m][k] - ...) + bias[n]
//         +---------+
//         |    x    |      Scales that change along K (groups of int4, 128 x 128 blocks) and the promotion of the
//         tensor
//         +---------+      cores' short fp8 sums are a fold: sum += scale (product - zero x_sum), once a group. While
//         one
//   +---+ +---------+      warpgroup folds, the tensor cores work for the other.
//   | W | |    y    |
//   +---+ +---------+
#pragma once

#include <type_traits>

#include "common/tma.cuh"
#include "int4_mm/layout.h"
#include "mm8/sm90_epilogue.cuh"
#include "mm8/sm90_operand.cuh"

namespace qao::mm8::sm90 {

// What happens to sums during the walk over K.
enum class Fold {
  kNone,     // nothing: scales wait for the epilogue
  kPromote,  // short float sums move to float32 every K-tile
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

// 65536 registers a multiprocessor: two consumer warpgroups keep most of what the producers' give up.
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

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

// One warp: the values per token.
template <typename K>
__device__ __forceinline__ void produce_columns(const Params& p, Ring ring) {
  for_each_tile<K>(p, [&](const Place& place) {
    const int64_t token0 = static_cast<int64_t>(place.token_block) * K::kTokens;
    for (int at = place.begin; at < place.end; ++at) {
      tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
      const uint32_t to = ring.address<K>() + K::kStage.x + K::kStage.weight + K::kStage.scales;
      const int group = first_group(p, at);
      const bool ends = ends_group(p, at);  // its sum of x comes off once; until then it counts as zero
      for (int i = threadIdx.x % 32; i < p.groups_per_tile * K::kTokens; i += 32) {
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

// One warpgroup's 64 rows of one tile of y. `groups`: int4 groups in a K-tile.
template <typename K, int groups>
struct Consumer {
  using T = typename K::T;

  const Params& p;
  Ring& ring;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  typename K::Product product[K::kTilesM][4];
  float sum[K::kFolds ? K::kTilesM : 1][4];
  Operand operand[2];  // K-tiles alternate between two
  RawOperand<T, K::kWeight> raw;
  const float* block_scales;  // of these rows of W
  float block_scale, next_block_scale;

  // Waits for the K-tile of the ring's present stage and reads what is to be converted.
  __device__ __forceinline__ void fetch() {
    tma::barrier_wait(ring.arrived_now(), ring.parity);
    if constexpr (K::kFromRegisters) raw.load(ring.address<K>() + K::kStage.x, warp, lane);
  }
  // `operand` from what fetch() read.
  template <int buffer>
  __device__ __forceinline__ void convert() {
    if constexpr (K::kFromRegisters) {
      raw.template convert<0>(operand[buffer][0]), raw.template convert<1>(operand[buffer][1]);
      raw.template convert<2>(operand[buffer][2]), raw.template convert<3>(operand[buffer][3]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        ptx::pin(operand[buffer][step]);  // or the compiler moves this work behind the wait it should hide under
      }
    }
  }

  // Products of k-steps [first, first + steps), 32 bytes of each token each. Nothing may write registers between them.
  template <int buffer, int first, int steps>
  __device__ __forceinline__ void multiply(uint32_t stage, bool fresh) {
    const uint64_t x = wgmma::descriptor(stage);
    const uint64_t weight = wgmma::descriptor(stage + K::kStage.x + warp / 4 * 64 * 128);
    wgmma::fence();
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      if constexpr (K::kFromRegisters) {
        wgmma::Product<T, K::kTokens>::run(product, operand[buffer][step], x + 2 * step, step > first || !fresh);
      } else {
        wgmma::Product<T, K::kTokens>::run(product, weight + 2 * step, x + 2 * step, step > first || !fresh);
      }
    }
    wgmma::commit();
  }

  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if constexpr (K::kShare > 1) {
      if (lane < K::kShare) tma::barrier_arrive_at(barrier, lane);
    } else {
      if (lane == 0) tma::barrier_arrive(barrier);
    }
  }

  // A group's scale and zero point, of rows g and g + 8. Zero points are in the units of the product.
  struct Group {
    float scale[2], zero[2];
  };
  template <DType dtype>
  __device__ __forceinline__ Group read_group(uint32_t from) const {
    constexpr bool kInteger = std::is_same_v<T, int8_t>;  // see load_packed
    Group group;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t at = from + (lane / 4 + high * 8) * size_of(dtype);
      group.scale[high] = load_shared_float<dtype>(at);
      const float zero = p.has_zeros ? load_shared_float<dtype>(at + int4_mm::kTileN * size_of(dtype)) : 8.0f;
      group.zero[high] = kInteger ? 16 * (zero - 8) : zero / 512;
    }
    return group;
  }
  __device__ __forceinline__ Group read_group(uint32_t stage, int index) const {
    if constexpr (K::kFold == Fold::kGroup) {
      const uint32_t from = stage + K::kStage.x + K::kStage.weight + (warp * p.groups_per_tile + index) * p.group_bytes;
      if (p.scale_dtype == DType::kBFloat16) return read_group<DType::kBFloat16>(from);
      if (p.scale_dtype == DType::kFloat16) return read_group<DType::kFloat16>(from);
      return read_group<DType::kFloat32>(from);
    } else if constexpr (K::kFold == Fold::kBlock) {
      return {{block_scale, block_scale}, {0, 0}};
    } else {
      return {};
    }
  }

  // sum += scale (product - zero column), or scale column product for blocks.
  __device__ __forceinline__ void fold(const Group& group, uint32_t columns) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
      float2 column = {1, 1};
      if constexpr (K::kColumns) column = ptx::load_shared_float2(columns + (j * 8 + lane % 4 * 2) * 4);
      const float column_of[2] = {column.x, column.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float value = static_cast<float>(product[j][e]);
        if constexpr (K::kFold == Fold::kPromote) {
          sum[j][e] += value;
        } else if constexpr (K::kFold == Fold::kBlock) {
          sum[j][e] += group.scale[0] * column_of[e % 2] * value;
        } else {
          sum[j][e] += group.scale[e / 2] * (K::kColumns ? value - group.zero[e / 2] * column_of[e % 2] : value);
        }
      }
    }
  }

  // The present K-tile, and the next one's operand; sums folded once a group.
  template <int buffer>
  __device__ __forceinline__ void folding_k_tile(int at, bool& fresh, bool last) {
    constexpr int kGroupSteps = kSteps / groups;
    const uint32_t stage = ring.address<K>(), released = ring.released_now();
    const uint32_t columns = stage + K::kStage.x + K::kStage.weight + K::kStage.scales;
    const bool folds = ends_group(p, at) || last || std::is_same_v<T, wgmma::E4m3>;
    if constexpr (K::kFold == Fold::kBlock) {
      block_scale = next_block_scale;
      next_block_scale = __ldg(block_scales + ((at + 1 == p.k_tiles ? 0 : at + 1) >> p.fold_shift));
    }
    ring.advance<K>();
    const auto group = [&](auto index) {
      constexpr int g = decltype(index)::value;
      multiply<buffer, g * kGroupSteps, kGroupSteps>(stage, groups > 1 || fresh);
      if constexpr (g + 1 == groups) {
        if (!last) {
          fetch();
          convert<1 - buffer>();
        }
      }
      const Group scales = read_group(stage, g);
      wgmma::wait<0>();
      if constexpr (g + 1 == groups && !K::kColumns) release(released);
      if (groups > 1 || folds) fold(scales, columns + g * K::kTokens * 4);
    };
    group(std::integral_constant<int, 0>{});
    if constexpr (groups > 1) group(std::integral_constant<int, 1>{});
    if constexpr (groups > 2) group(std::integral_constant<int, 2>{}), group(std::integral_constant<int, 3>{});
    if constexpr (K::kColumns) release(released);
    fresh = folds;
  }

  __device__ __forceinline__ void walk_folding(int begin, int end) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = 0;
    }
    bool fresh = true;
    int at = begin % p.k_tiles;
    const auto next = [&] { at = at + 1 == p.k_tiles ? 0 : at + 1; };
    if constexpr (K::kFold == Fold::kBlock) next_block_scale = __ldg(block_scales + (at >> p.fold_shift));
    fetch();
    convert<0>();
    for (int i = begin; i < end; i += 2) {
      folding_k_tile<0>(at, fresh, i + 1 == end);
      next();
      if (i + 1 < end) {
        folding_k_tile<1>(at, fresh, i + 2 == end);
        next();
      }
    }
  }

  // Without folds one K-tile's products may be under way while the next one's are issued.
  template <int buffer>
  __device__ __forceinline__ void k_tile(bool first, bool last, uint32_t& unreleased) {
    multiply<buffer, 0, kSteps>(ring.address<K>(), first);
    wgmma::wait<1>();
    if (!first) release(unreleased);
    unreleased = ring.released_now();
    ring.advance<K>();
    if (!last) {
      fetch();
      convert<1 - buffer>();
    }
  }

  __device__ __forceinline__ void walk(int begin, int end) {
    uint32_t unreleased = 0;
    fetch();
    convert<0>();
    for (int i = begin; i < end; i += 2) {
      k_tile<0>(i == begin, i + 1 == end, unreleased);
      if (i + 1 < end) k_tile<1>(false, i + 2 == end, unreleased);
    }
    wgmma::wait<0>();
    release(unreleased);
  }

  __device__ __forceinline__ void run(const Place& at, uint32_t epilogue) {
    const int64_t token0 = static_cast<int64_t>(at.token_block) * K::kTokens;
    const uint32_t tokens = epilogue + kEpilogueBytes + warp / 4 * 2 * K::kTokens * 4;
    fetch_tokens<K::kTokens>(p, tokens, token0);
    if (K::kFold == Fold::kBlock) block_scales = p.block_scales + static_cast<int64_t>(at.row_block) * p.groups;
    if constexpr (K::kFolds) {
      walk_folding(at.begin, at.end);
    } else {
      walk(at.begin, at.end);
    }
    const int row0 = at.row_block * kTileN + warp / 4 * 64;
    const auto& result = [this]() -> auto& {
      if constexpr (K::kFolds) {
        return sum;
      } else {
        return product;
      }
    }();
    if (p.split_k > 1) {
      if constexpr (K::kShare == 1) {
        ptx::named_barrier(3, kConsumerThreads);  // both warpgroups are done with the ring, which the tile overlays
        write_result<K::kTokens, true, K::kTilesM>(p, result, ring.data, tokens, token0, row0);
      }
    } else if (p.y_dtype == DType::kBFloat16) {
      write_half_result<__nv_bfloat16, K::kTilesM>(p, result, epilogue, tokens, token0, row0);
    } else if (p.y_dtype == DType::kFloat16) {
      write_half_result<__half, K::kTilesM>(p, result, epilogue, tokens, token0, row0);
    } else {
      write_result<kChunkTokens, false, K::kTilesM>(p, result, epilogue, tokens, token0, row0);
    }
  }
};

template <typename K>
__global__ void __launch_bounds__(kConsumerThreads + kProducerThreads, 1)
    mm8_kernel(Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t arrived[K::kStage.count], released[K::kStage.count];
  Ring ring{ptx::shared_address(shared), ptx::shared_address(arrived), ptx::shared_address(released)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < K::kStage.count; ++i) {
      tma::barrier_init(ring.arrived + i * 8, 1 + (K::kColumns ? 32 : 0));
      tma::barrier_init(ring.released + i * 8, kConsumerThreads / 32 * K::kShare);
    }
    tma::barrier_init_fence();
  }
  if constexpr (K::kShare > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  if (threadIdx.x >= kConsumerThreads) {
    ptx::limit_registers<kProducerRegisters>();
    const int warp = (threadIdx.x - kConsumerThreads) / 32;
    if (warp == 0 && threadIdx.x % 32 == 0) produce<K>(p, maps, ring);
    if (K::kColumns && warp == 1) produce_columns<K>(p, ring);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    const uint32_t epilogue = ring.data + K::kStage.epilogue;
    for_each_tile<K>(p, [&](const Place& at) {
      if (K::kPacked && p.groups_per_tile == 4) {
        Consumer<K, K::kPacked ? 4 : 1>{p, ring}.run(at, epilogue);
      } else if (K::kPacked && p.groups_per_tile == 2) {
        Consumer<K, K::kPacked ? 2 : 1>{p, ring}.run(at, epilogue);
      } else {
        Consumer<K, 1>{p, ring}.run(at, epilogue);
      }
    });
  }
  if constexpr (K::kShare > 1) ptx::cluster_barrier();  // a CTA that has gone can take no arrivals
}

}  // namespace qao::mm8::sm90
