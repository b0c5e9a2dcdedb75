// The Hopper body: wgmma with W as the 64-row operand and x as the columns, both brought by the copy engine.
//
// A producer thread keeps a ring of K-tiles full, some columns of each token and the same columns of W. Two consumer
// warpgroups own 64 rows of W each. int8 x int8 and fp8 x fp8 multiply straight from shared memory; where W needs
// converting (int4, or 8 bits beside a float x) a warpgroup makes the next K-tile's operand in registers while the
// tensor cores work on the present one. CTAs are persistent: a tile's first K-tiles arrive during the last epilogue.
//
//            tokens
//         +---------+      y[m][n] = x_scale[m] (row_scale[n] sum over k of W[n][k] x[m][k] - ...) + bias[n]
//         |    x    |
//         +---------+      Scales that change along K (groups of int4, 128 x 128 blocks) and the promotion of
//   +---+ +---------+      short fp8 sums are a fold, once a group: sum += scale (product - zero x_sum). While
//   | W | |    y    |      one warpgroup folds, the tensor cores work for the other.
//   +---+ +---------+
#pragma once

#include "mm8/sm90_epilogue.cuh"
#include "mm8/sm90_operand.cuh"
#include "mm8/sm90_producer.cuh"
#include "mm8/sm90_swapped.cuh"

namespace qao::mm8::sm90 {

// One warpgroup's 64 rows of one tile of y.
template <typename K>
struct Consumer {
  using T = typename K::T;

  const Params& p;
  Ring<K>& ring;
  const uint32_t to_producer;  // from a barrier of this CTA to that of a CTA this lane releases stages to
  const int lane = threadIdx.x % 32, warp = ptx::warp_index();
  typename K::Product product[K::kTilesM][4];
  float sum[K::kFolds ? K::kTilesM : 1][4];
  Operand<K::kSteps> operand[K::kScalesOperand ? 1 : 2];  // K-tiles alternate between two
  RawOperand<T, K::kWeight, K::kScalesOperand, K::kSteps> raw;
  std::conditional_t<K::kSwapped, TokenScales, int> token_scales;
  const float* block_scales;  // of these rows of W
  float block_scale, next_block_scale;

  // Waits for the K-tile of the ring's present stage and reads what is to be converted.
  template <int groups = 1>
  __device__ __forceinline__ void fetch() {
    tma::barrier_wait(ring.arrived(), ring.parity);
    const uint32_t weight = ring.address() + K::kStage.x;
    if constexpr (K::kScalesOperand) {
      raw.template load<groups>(weight, weight + K::kStage.weight + K::kStage.scales, ring.rest(), warp, lane);
    } else if constexpr (K::kFromRegisters) {
      raw.load(weight, warp, lane);
    }
  }
  // An operand from what fetch() read.
  template <int buffer>
  __device__ __forceinline__ void convert() {
    if constexpr (K::kFromRegisters) {
      raw.convert(operand[buffer]);
#pragma unroll
      for (int step = 0; step < K::kSteps; ++step) {
        ptx::pin(operand[buffer][step]);  // or the compiler moves this work behind the wait it should hide under
      }
    }
  }

  // Products of k-steps [first, first + steps), 32 bytes of each token each. Nothing may write registers between them.
  template <int buffer, int first, int steps>
  __device__ __forceinline__ void multiply(uint32_t stage, bool fresh) {
    // The 64 rows of this warpgroup's operand, and the columns that all of them take.
    const uint32_t own = warp / 4 * 64 * 128, weight_at = stage + K::kStage.x;
    const uint64_t x = wgmma::descriptor(stage + (K::kSwapped ? own : 0));
    const uint64_t weight = wgmma::descriptor(weight_at + (K::kSwapped ? 0 : own));
    wgmma::fence();
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      if constexpr (K::kFromRegisters) {
        const uint64_t columns = x + step / kAtomSteps * (K::kTokens * 128 / 16) + step % kAtomSteps * 2;
        wgmma::Product<T, K::kTokens>::run(product, operand[buffer][step], columns, step > first || !fresh);
      } else if constexpr (K::kSwapped) {
        wgmma::Product<T, kTileN>::run(product, x + 2 * step, weight + 2 * step, step > first || !fresh);
      } else {
        wgmma::Product<T, K::kTokens>::run(product, weight + 2 * step, x + 2 * step, step > first || !fresh);
      }
    }
    wgmma::commit();
  }

  // To the producers of all CTAs that fetch x together.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane < p.share) tma::barrier_arrive_cluster(barrier + to_producer);
  }

  // A group's scale and zero point, of rows g and g + 8. Zero points are in the units of the product.
  struct Group {
    float scale[2], zero[2];
  };
  template <DType dtype>
  __device__ __forceinline__ Group read_group(uint32_t from) const {
    Group group;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t at = from + (lane / 4 + high * 8) * size_of(dtype);
      group.scale[high] = load_shared_float<dtype>(at);
      const float zero = p.has_zeros ? load_shared_float<dtype>(at + int4_mm::kTileN * size_of(dtype)) : 8.0f;
      group.zero[high] = K::kFloatX                  ? zero - 8
                         : std::is_same_v<T, int8_t> ? 16 * (zero - 8)
                                                     : zero / 512;  // see RawOperand
    }
    return group;
  }
  __device__ __forceinline__ Group read_group(uint32_t stage, int index) const {
    if constexpr (K::kFold == Fold::kGroup) {
      const uint32_t from = stage + K::kStage.x + K::kStage.weight + (warp * p.groups_per_tile + index) * p.group_bytes;
      if (p.scale_dtype == DType::kBFloat16) return read_group<DType::kBFloat16>(from);
      if (p.scale_dtype == DType::kFloat16) return read_group<DType::kFloat16>(from);
      return read_group<DType::kFloat32>(from);
    } else if constexpr (K::kSwapped) {
      return {{token_scales.of(0), token_scales.of(1)}, {0, 0}};
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
          sum[j][e] += group.scale[e / 2] * column_of[e % 2] * value;
        } else {
          sum[j][e] += group.scale[e / 2] * (K::kColumns ? value - group.zero[e / 2] * column_of[e % 2] : value);
        }
      }
    }
  }

  // The present K-tile, and the next one's operand; sums folded once a group, or where the tensor cores would cut them
  // short. `groups`: of int4 in a K-tile.
  template <int groups, int buffer>
  __device__ __forceinline__ void folding_k_tile(int at, bool& fresh, bool last) {
    constexpr int kGroupSteps = K::kSteps / groups;
    const uint32_t stage = ring.address(), released = ring.released();
    const uint32_t columns = stage + K::kStage.x + K::kStage.weight + K::kStage.scales;
    const bool folds = ends_group(p, at) || last || !std::is_same_v<T, int8_t>;
    if constexpr (K::kFold == Fold::kBlock && !K::kSwapped) {
      block_scale = next_block_scale;
      next_block_scale = __ldg(block_scales + ((at + 1 == p.k_tiles ? 0 : at + 1) >> p.fold_shift));
    }
    ring.advance();
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
      if constexpr (K::kSwapped) token_scales.advance();
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

  template <int groups>
  __device__ __forceinline__ void walk_folding(int begin, int end) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = 0;
    }
    bool fresh = true;
    int at = begin % p.k_tiles;
    const auto next = [&] { at = at + 1 == p.k_tiles ? 0 : at + 1; };
    if constexpr (K::kSwapped) {
      token_scales.start(p, block_scales, begin, end);
    } else if constexpr (K::kFold == Fold::kBlock) {
      next_block_scale = __ldg(block_scales + (at >> p.fold_shift));
    }
    fetch();
    convert<0>();
    for (int i = begin; i < end; i += 2) {
      folding_k_tile<groups, 0>(at, fresh, i + 1 == end);
      next();
      if (i + 1 < end) {
        folding_k_tile<groups, 1>(at, fresh, i + 2 == end);
        next();
      }
    }
  }

  __device__ __forceinline__ void zero_product() {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) product[j][e] = 0;
    }
  }

  // Without folds one K-tile's products may be under way while the next one's are issued.
  template <int buffer>
  __device__ __forceinline__ void k_tile(bool first, bool last, uint32_t& unreleased) {
    multiply<buffer, 0, K::kSteps>(ring.address(), false);
    wgmma::wait<1>();
    if (!first) release(unreleased);
    unreleased = ring.released();
    ring.advance();
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

  // The same with one operand, made once its last products are done: that hides under the other warpgroup's products.
  template <int groups>
  __device__ __forceinline__ void walk_scaling(int begin, int end) {
    uint32_t unreleased = 0;
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      fetch<groups>();
      wgmma::wait<0>();
      if (i > begin) release(unreleased);
      convert<0>();
      multiply<0, 0, K::kSteps>(ring.address(), false);
      unreleased = ring.released();
      ring.advance();
    }
    wgmma::wait<0>();
    release(unreleased);
  }

  __device__ __forceinline__ void run(const Place& at, uint32_t epilogue) {
    ptx::wait_for_previous_kernel();
    fetch_scales<K>(p, rows(), tokens(), row0(at), token0(at));
    if (K::kFold == Fold::kBlock) {
      const int block = min(row0(at) + warp % 4 * 16, p.n - 1) / kScaleBlock;
      block_scales = p.block_scales + static_cast<int64_t>(block) * p.groups;
    }
    if constexpr (K::kSwapped) token_scales.token = token0(at) + warp * 16 + lane / 4;
    if constexpr (!K::kFolds) {
      zero_product();
      if constexpr (K::kScalesOperand) {
        if (p.groups_per_tile == 1) {
          walk_scaling<1>(at.begin, at.end);
        } else if (K::kAtoms == 1 || p.groups_per_tile == 2) {
          walk_scaling<2>(at.begin, at.end);
        } else {
          walk_scaling<2 * K::kAtoms>(at.begin, at.end);
        }
      } else {
        walk(at.begin, at.end);
      }
      write(product, epilogue, at);
    } else {
      if (K::kPacked && p.groups_per_tile == 2) {
        walk_folding<K::kPacked ? 2 : 1>(at.begin, at.end);
      } else if (K::kPacked && !K::kFloatX && p.groups_per_tile == 4) {
        walk_folding<K::kPacked && !K::kFloatX ? 4 : 1>(at.begin, at.end);
      } else {
        walk_folding<1>(at.begin, at.end);
      }
      write(sum, epilogue, at);
    }
  }

  __device__ __forceinline__ uint32_t rows() const { return ring.data + K::kStage.rows + warp / 4 * 3 * 64 * 4; }
  __device__ __forceinline__ uint32_t tokens() const {
    return ring.data + K::kStage.tokens + warp / 4 * 2 * K::kTokens * 4;
  }
  __device__ __forceinline__ int row0(const Place& at) const { return at.row_block * p.tile_rows + warp / 4 * 64; }
  __device__ __forceinline__ int64_t token0(const Place& at) const {
    return static_cast<int64_t>(at.token_block) * K::kTokens;
  }

  // A float x gives a y of its own dtype; one in bfloat16 parts was float32.
  template <typename Sum>
  __device__ __forceinline__ void write(const Sum& result, uint32_t epilogue, const Place& at) const {
    constexpr bool kFloatY = !K::kFloatX || K::kFolds, kHalfY = !K::kFloatX || !K::kFolds || K::kFold == Fold::kBlock;
    const Target target{rows(), tokens(), token0(at), row0(at), min(p.n, (at.row_block + 1) * p.tile_rows)};
    if (p.split_k > 1) {
      // All warpgroups are done with the ring, which the tile overlays.
      ptx::named_barrier(3, warpgroups(p) * 128);
      write_split_result<K>(p, result, ring.data, target);
    } else if constexpr (K::kSwapped) {
      write_swapped_result<K>(p, result, ring.data + K::kStage.rows, epilogue, token0(at), at.row_block * p.tile_rows);
    } else if (kFloatY && (!kHalfY || p.y_dtype == DType::kFloat32)) {
      if constexpr (kFloatY) write_float_result<K>(p, result, target);
    } else {
      if constexpr (kHalfY) write_half_result<K>(p, result, epilogue, target);
    }
  }
};

template <typename K>
__global__ void __launch_bounds__(kConsumerThreads + kProducerThreads, 1)
    mm8_kernel(Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<K> ring{ptx::shared_address(shared)};
  if (threadIdx.x < K::kStage.count) {
    const uint32_t barrier = ring.arrived() + threadIdx.x * 8;
    tma::barrier_init(barrier, 1 + (K::kColumns ? kHelperThreads : K::kScalesOperand ? 32 : 0));
    tma::barrier_init(barrier + kBarrierBytes, warpgroups(p) * 4 * p.share);
    if (K::kScalesOperand) tma::barrier_init(barrier + 2 * kBarrierBytes, 1);
    tma::barrier_init_fence();
  }
  const int warp = ptx::warp_index() - kConsumerThreads / 32;
  if (warp == 0 && ptx::elect_one()) tma::prefetch_map(&maps.x);
  if (p.share > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  // All that comes from the kernel before, and the y that it may still read, is only touched after a wait for it: each
  // role waits when all else is ready. W may be its work too: up to there it went to L2 alone, where it cannot grow
  // stale.
  if (warp >= 0) {
    ptx::limit_registers<K::kProducerRegisters>();
    if (warp == 1) prefetch_weight<K>(p, maps);
    if (warp == 0) produce<K>(p, maps, ring);
    if (K::kColumns && warp > 0) produce_columns<K>(p, ring);
    if constexpr (K::kScalesOperand) {
      if (warp > 0) make_scales<K>(p, ring);
    }
  } else {
    ptx::raise_registers<K::kConsumerRegisters>();
    const uint32_t epilogue = ring.data + K::kStage.epilogue;
    const int peer = (ptx::cluster_rank() & -p.share) + threadIdx.x % 32 % p.share;
    const uint32_t to_producer = ptx::cluster_address(ring.data, peer) - ring.data;
    if (warp + kConsumerThreads / 32 < warpgroups(p) * 4) {
      for_each_tile<K>(p, [&](const Place& at) { Consumer<K>{p, ring, to_producer}.run(at, epilogue); });
    }
  }
  if (p.share > 1 && p.split_k == 1) ptx::cluster_barrier();  // a CTA that has gone can take no arrivals
}

}  // namespace qao::mm8::sm90
