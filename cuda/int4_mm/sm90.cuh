// The Hopper body for many tokens: wgmma with weights dequantised in registers as the 64-row operand and x read from
// shared memory, everything brought by the copy engine.
//
// A producer thread keeps a ring of K-tiles full. Two consumer warpgroups own 64 rows of W each; while the tensor cores
// work on a warpgroup's K-tile it dequantises the next, and while it adds up a group's sum they work for the other:
//
//   tensor cores  | A, tile 0 | B, tile 0 | A, tile 1 | B, tile 1 | ...
//   warpgroup A   | prepare 1 | add 0     | prepare 2 | add 1     | ...
//   warpgroup B   |           | prepare 1 | add 0     | prepare 2 | ...
#pragma once

#include "common/tma.cuh"
#include "common/wgmma.cuh"
#include "int4_mm/cta.cuh"

namespace qao::int4_mm::sm90 {

constexpr int kSteps = kTileK / 16;

// 65536 registers a multiprocessor: two consumer warpgroups keep most of what the producers' give up.
constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;

// A warp's rows of one K-tile, ready for the tensor cores.
struct Operand {
  uint32_t step[kSteps][4];
};

// k-steps [first, first + steps) share a group. `fresh` begins a sum, otherwise the products are added to it.
template <int first, int steps, typename T, typename Tile>
__device__ __forceinline__ void start_product(float (&product)[Tile::kTilesM][4], const Operand& a, uint64_t x,
                                              bool fresh) {
  wgmma::fence();
#pragma unroll
  for (int step = first; step < first + steps; ++step) {
    wgmma::Product<T, Tile::kTilesM * 8>::run(product, a.step[step], x + 2 * step, step > first || !fresh);
  }
  wgmma::commit();
}

template <typename Cta, typename Tile>
__device__ __forceinline__ void add_scaled(const typename Cta::Group& group, const float (&product)[Tile::kTilesM][4],
                                           float (&sum)[Tile::kTilesM][4]) {
#pragma unroll
  for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[j][e] += group.scale[e / 2] * product[j][e];
  }
}

// The mbarriers of the ring, one pair a stage.
struct Ring {
  uint32_t arrived, released;  // shared addresses
  int stage = 0, parity = 0;

  __device__ __forceinline__ uint32_t arrived_now() const { return arrived + stage * 8; }
  __device__ __forceinline__ uint32_t released_now() const { return released + stage * 8; }
  __device__ __forceinline__ void advance(int stages) {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// One thread of the producer warps: fills stage after stage with K-tiles. What lies outside a tensor arrives as zero.
template <typename Tile, typename Cta>
__device__ __forceinline__ void produce(const Params& p, const TensorMaps& maps, const Cta& cta, Ring ring, int begin,
                                        int end) {
  const int groups = p.group_shift < 0 ? 2 : 1;  // per K-tile
  const int bytes = Tile::kXBytes + Tile::kWeightBytes + Tile::kRowTiles * groups * p.group_bytes;
  int part = begin / p.k_tiles, k_tile = begin % p.k_tiles;
  for (int i = begin; i < end; ++i) {
    if (i - begin >= Tile::kStages) tma::barrier_wait(ring.released_now(), ring.parity ^ 1);
    const uint32_t to = cta.stage_address(ring.stage), barrier = ring.arrived_now();
    tma::barrier_expect(barrier, bytes);
    tma::load_3d(Cta::x_address(to), &maps.x, k_tile * kTileK, part, static_cast<int>(cta.token0), barrier);
    tma::load_3d(to, &maps.weight, 0, k_tile, cta.row_tile0, barrier);
    tma::load_3d(Cta::scale_address(to), &maps.scales, 0, groups == 2 ? 2 * k_tile : k_tile >> p.group_shift,
                 cta.row_tile0, barrier);
    ring.advance(Tile::kStages);
    if (++k_tile == p.k_tiles) k_tile = 0, ++part;
  }
}

// One warpgroup's 64 rows. K-tiles alternate between two operand buffers.
template <bool two_groups, typename T, typename Tile, typename Cta>
struct Consumer {
  static constexpr int kGroups = two_groups ? 2 : 1, kGroupSteps = kSteps / kGroups;

  const Params& p;
  const Cta& cta;
  typename Cta::Sums& sum;
  Ring ring;
  typename Cta::Group groups[2][kGroups];  // a buffer's
  Operand operand[2];
  float product[Tile::kTilesM][4];  // of the K-tiles of a group so far
  int at;                           // the present K-tile, counted within its part of x
  bool fresh = true;                // it is the first of its group
  const int group_mask = two_groups ? 0 : (1 << p.group_shift) - 1;

  // Dequantises the K-tile of the ring's present stage, once it has arrived.
  template <int buffer>
  __device__ __forceinline__ void prepare_next() {
    tma::barrier_wait(ring.arrived_now(), ring.parity);
    const uint32_t stage = cta.stage_address(ring.stage);
    const uint4 words = cta.read_words(stage, 0);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) cta.read_group(stage, g, 0, groups[buffer][g], kGroups * p.group_bytes);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      Cta::dequantize(Cta::word_of(words, step), groups[buffer][step / kGroupSteps], operand[buffer].step[step]);
    }
    if (Cta::any_fraction(groups[buffer])) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        Cta::take_fraction(groups[buffer][step / kGroupSteps], operand[buffer].step[step]);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::pin(operand[buffer].step[step]);  // or the compiler moves this work behind the wait it should hide under
    }
  }

  // Multiplies what is in `buffer`; `meanwhile` runs beside the tensor cores. Scales are applied once a group.
  template <int buffer, typename Meanwhile>
  __device__ __forceinline__ void multiply(uint64_t x, bool ends_group, const Meanwhile& meanwhile) {
    start_product<0, kGroupSteps, T, Tile>(product, operand[buffer], x, two_groups || fresh);
    if constexpr (two_groups) {
      wgmma::wait<0>();
      add_scaled<Cta, Tile>(groups[buffer][0], product, sum[0]);
      start_product<kGroupSteps, kGroupSteps, T, Tile>(product, operand[buffer], x, true);
    }
    meanwhile();
    wgmma::wait<0>();
    if (two_groups || ends_group) add_scaled<Cta, Tile>(groups[buffer][kGroups - 1], product, sum[0]);
  }

  template <int buffer>
  __device__ __forceinline__ void k_tile(bool last) {
    const uint64_t x = wgmma::descriptor(Cta::x_address(cta.stage_address(ring.stage)));
    const uint32_t released = ring.released_now();
    ring.advance(Tile::kStages);
    at = at + 1 == p.k_tiles ? 0 : at + 1;
    const bool ends_group = last || (at & (group_mask)) == 0;
    multiply<buffer>(x, ends_group, [&] {
      if (!last) prepare_next<1 - buffer>();
    });
    fresh = ends_group;
    __syncwarp();
    if (cta.lane == 0) tma::barrier_arrive(released);
  }

  __device__ __forceinline__ void run(int begin, int end) {
    const int k_tiles = end - begin;
    if (k_tiles == 0) return;
    at = begin % p.k_tiles;
    prepare_next<0>();
    for (int i = 0; i < k_tiles; i += 2) {
      k_tile<0>(i + 1 == k_tiles);
      if (i + 1 < k_tiles) k_tile<1>(i + 2 == k_tiles);
    }
  }
};

template <typename T, typename Tile, bool zeros>
__global__ void __launch_bounds__(Tile::kThreads + kProducerThreads, Tile::kCtasPerSm)
    int4_mm_kernel(const Params p, const __grid_constant__ TensorMaps maps) {
  static_assert(Tile::kWarpsN == 8 && Tile::kWarpsM == 1 && Tile::kWarpsK == 1 && Tile::kTilesN == 1,
                "two warpgroups of 64 rows of W");
  static_assert(Tile::kStageBytes % 1024 == 0 && Tile::kWeightBytes % 1024 == 0, "the swizzle counts from 1024 bytes");
  using Cta = Cta<T, Tile, zeros>;
  extern __shared__ __align__(1024) uint8_t shared[];
  __shared__ uint64_t arrived[Tile::kStages], released[Tile::kStages];
  const Ring ring{ptx::shared_address(arrived), ptx::shared_address(released)};
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kStages; ++i) {
      tma::barrier_init(ring.arrived + i * 8, 1);
      tma::barrier_init(ring.released + i * 8, Tile::kThreads / 32);
    }
    tma::barrier_init_fence();
  }
  __syncthreads();
  const Place at = place<Tile>(p);
  // The ring belongs to all warps, so addresses are those of slice 0 for the producer too.
  const Cta cta(p, at.row_block, at.token_block, ptx::shared_address(shared));
  if (threadIdx.x >= Tile::kThreads) {
    ptx::limit_registers<kProducerRegisters>();
    if (threadIdx.x == Tile::kThreads) produce<Tile>(p, maps, cta, ring, at.begin, at.end);
  } else {
    ptx::raise_registers<kConsumerRegisters>();
    typename Cta::Sums sum = {};
    if (p.group_shift < 0) {
      Consumer<true, T, Tile, Cta>{p, cta, sum, ring}.run(at.begin, at.end);
    } else {
      Consumer<false, T, Tile, Cta>{p, cta, sum, ring}.run(at.begin, at.end);
    }
    cta.write_result(sum, reinterpret_cast<float*>(shared), at.split);
  }
}

}  // namespace qao::int4_mm::sm90
