// The Hopper body for many tokens: wgmma with W as the 64-row operand, dequantised in registers, and x as the columns
// from shared memory, everything brought by the copy engine.
//
// A producer warp keeps a ring of K-tiles full: 64 columns of x, of W and its scales, which three more warps make
// ready. Two consumer warpgroups own 64 rows of W each; one makes its next operand under the products of the other.
// CTAs are persistent: a tile's first K-tiles arrive during the last epilogue.
//
//            tokens
//         +---------+      y[m][n] = sum over k of W[n][k] x[m][k] + bias[n]
//         |    x    |
//         +---------+      W = (q - zero) scale, rounded once to the 16 bits of x. A float32 x, three bfloat16 parts,
//   +---+ +---------+      is multiplied by whole numbers instead, and its sums are scaled once a K-tile.
//   | W | |    y    |
//   +---+ +---------+
#pragma once

#include "common/wgmma.cuh"
#include "int4_mm/sm90_epilogue.cuh"
#include "int4_mm/sm90_operand.cuh"
#include "int4_mm/sm90_producer.cuh"

namespace qao::int4_mm::sm90 {

// One warpgroup's 64 rows of one tile of y.
template <typename K>
struct Consumer {
  using T = typename K::T;

  const Params& p;
  Ring& ring;
  const int lane = threadIdx.x % 32, warp = ptx::warp_index(), rank = ptx::cluster_rank();
  float product[K::kTilesM][4];
  float sum[K::kExact ? K::kTilesM : 1][4];
  Operand operand[K::kExact ? 2 : 1];  // exact: K-tiles alternate between two
  typename K::Raw raw;

  // Waits for the K-tile of the ring's present stage and reads what is to be converted.
  __device__ __forceinline__ void fetch() {
    tma::barrier_wait(ring.arrived_now(), ring.parity);
    const uint32_t weight = ring.address<K>() + K::kStage.x;
    raw.load(weight, weight + K::kStage.weight + K::kStage.scales, p.groups_per_tile, warp, lane);
  }
  // An operand from what fetch() read.
  template <int buffer>
  __device__ __forceinline__ void convert() {
    raw.convert(operand[buffer]);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::pin(operand[buffer][step]);  // or the compiler moves this work behind the wait it should hide under
    }
  }

  // Products of k-steps [first, first + steps), added to `product` unless `fresh`. Nothing may write registers between.
  template <int buffer, int first, int steps>
  __device__ __forceinline__ void multiply(uint32_t stage, bool fresh) {
    const uint64_t x = wgmma::descriptor(stage);
    wgmma::fence();
#pragma unroll
    for (int step = first; step < first + steps; ++step) {
      wgmma::Product<T, K::kTokens>::run(product, operand[buffer][step], x + 2 * step, step > first || !fresh);
    }
    wgmma::commit();
  }

  // To the producers of all CTAs that fetch x together.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    if (lane < p.share) tma::barrier_arrive_at(barrier, p.share > 1 ? lane : rank);
  }

  static __device__ __forceinline__ void clear(float (&sums)[K::kTilesM][4]) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sums[j][e] = 0;
    }
  }

  // Products that take an operand from registers hold up the warps that issue them, so conversion hides only under the
  // products of the other warpgroup, and one operand is enough.
  __device__ __forceinline__ void walk(int begin, int end) {
    clear(product);
    fetch();
    convert<0>();
#pragma unroll 1
    for (int i = begin; i < end; ++i) {
      const bool more = i + 1 < end;
      const uint32_t released = ring.released_now();
      multiply<0, 0, kSteps>(ring.address<K>(), false);
      ring.advance<K>();
      if (more) fetch();
      wgmma::wait<0>();
      release(released);
      if (more) convert<0>();
    }
  }

  // A group's scale and zero point - 8, of rows g and g + 8.
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
      const float zero = p.has_zeros ? load_shared_float<dtype>(at + kTileN * size_of(dtype)) : kSymmetricZero;
      group.zero[high] = zero - kSymmetricZero;
    }
    return group;
  }
  __device__ __forceinline__ Group read_group(uint32_t stage, int index) const {
    const uint32_t from = stage + K::kStage.x + K::kStage.weight + (warp * p.groups_per_tile + index) * p.group_bytes;
    if (p.scale_dtype == DType::kBFloat16) return read_group<DType::kBFloat16>(from);
    if (p.scale_dtype == DType::kFloat16) return read_group<DType::kFloat16>(from);
    return read_group<DType::kFloat32>(from);
  }
  __device__ __forceinline__ void fold(const Group& group, uint32_t sums) {
#pragma unroll
    for (int j = 0; j < K::kTilesM; ++j) {
      const float2 x_sum = ptx::load_shared_float2(sums + (j * 8 + lane % 4 * 2) * 4);
      const float x_sum_of[2] = {x_sum.x, x_sum.y};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        sum[j][e] += group.scale[e / 2] * (product[j][e] - group.zero[e / 2] * x_sum_of[e % 2]);
      }
    }
  }

  // The present K-tile, and the next one's operand. `groups`: in a K-tile.
  template <int groups, int buffer>
  __device__ __forceinline__ void exact_k_tile(bool last) {
    constexpr int kGroupSteps = kSteps / groups;
    const uint32_t stage = ring.address<K>(), released = ring.released_now();
    const uint32_t sums = stage + K::kStage.x + K::kStage.weight + K::kStage.scales;
    ring.advance<K>();
    const auto group = [&](auto index) {
      constexpr int g = decltype(index)::value;
      multiply<buffer, g * kGroupSteps, kGroupSteps>(stage, true);
      if constexpr (g + 1 == groups) {
        if (!last) {
          fetch();
          convert<1 - buffer>();
        }
      }
      const Group scales = read_group(stage, g);
      wgmma::wait<0>();
      fold(scales, sums + g * K::kTokens * 4);
    };
    group(std::integral_constant<int, 0>{});
    if constexpr (groups > 1) group(std::integral_constant<int, 1>{});
    release(released);
  }
  template <int groups>
  __device__ __forceinline__ void walk_exact(int begin, int end) {
    clear(sum);
    fetch();
    convert<0>();
    for (int i = begin; i < end; i += 2) {
      exact_k_tile<groups, 0>(i + 1 == end);
      if (i + 1 < end) exact_k_tile<groups, 1>(i + 2 == end);
    }
  }

  __device__ __forceinline__ void run(const Place& at, uint32_t epilogue) {
    const int64_t token0 = static_cast<int64_t>(at.token_block) * K::kTokens;
    const int row0 = at.row_block * kRows + warp / 4 * 64;
    if constexpr (!K::kExact) {
      walk(at.begin, at.end);
      write(product, epilogue, token0, row0);
    } else {
      if (p.groups_per_tile == 2) {
        walk_exact<2>(at.begin, at.end);
      } else {
        walk_exact<1>(at.begin, at.end);
      }
      write(sum, epilogue, token0, row0);
    }
  }

  __device__ __forceinline__ void write(const float (&result)[K::kTilesM][4], uint32_t epilogue, int64_t token0,
                                        int row0) const {
    if (K::kSplits && p.split_k > 1) {
      if constexpr (K::kSplits) {
        ptx::named_barrier(3, kConsumerThreads);  // both warpgroups are done with the ring, which the tile overlays
        write_split_result<K>(p, result, ring.data, token0, row0);
      }
    } else if constexpr (K::kExact) {
      write_float_result<K>(p, result, token0, row0);
    } else {
      write_half_result<K>(p, result, epilogue, token0, row0);
    }
  }
};

template <typename K>
__global__ void __launch_bounds__(kConsumerThreads + kProducerThreads, K::kCtasPerSm)
    int4_mm_kernel(Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t arrived[K::kStage.count], released[K::kStage.count], scales_arrived[K::kStage.count];
  Ring ring{ptx::shared_address(shared), ptx::shared_address(arrived), ptx::shared_address(released),
            ptx::shared_address(scales_arrived)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < K::kStage.count; ++i) {
      tma::barrier_init(ring.arrived + i * 8, 1 + (K::kExact ? kHelperThreads : 1));
      tma::barrier_init(ring.released + i * 8, kConsumerThreads / 32 * p.share);
      if (!K::kExact) tma::barrier_init(ring.scales_arrived + i * 8, 1);
    }
    tma::barrier_init_fence();
  }
  if (p.share > 1) {
    ptx::cluster_barrier();
  } else {
    __syncthreads();
  }
  const int warp = ptx::warp_index() - kConsumerThreads / 32;
  if (warp >= 0) {
    ptx::limit_registers<K::kProducerRegisters>();
    if (warp == 0) {
      produce<K>(p, maps, ring);
    } else if constexpr (K::kExact) {
      fetch_sums<K>(p, ring);
    } else {
      make_scales<K>(p, ring);
    }
  } else {
    ptx::raise_registers<K::kConsumerRegisters>();
    for_each_tile<K>(p, [&](const Place& at) { Consumer<K>{p, ring}.run(at, ring.data + K::kStage.epilogue); });
  }
  if (p.share > 1) ptx::cluster_barrier();  // a CTA that has gone can take no arrivals
}

}  // namespace qao::int4_mm::sm90
