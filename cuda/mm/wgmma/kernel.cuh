// The Hopper body: wgmma with W as the 64-row operand and x as the columns, both brought by the copy engine.
//
// A producer thread keeps a ring of K-tiles full, some columns of each token and the same columns of W. Two or three
// consumer warpgroups own 64 rows of W each. int8 x int8 and fp8 x fp8 multiply straight from shared memory; where W
// needs converting (int4, or 8 bits beside a float x) a warpgroup makes the next K-tile's operand in registers while
// the tensor cores work on the present one. CTAs are persistent: a tile's first K-tiles arrive during the last
// epilogue.
//
//            tokens
//         +---------+      y[m][n] = x_scale[m] (row_scale[n] sum over k of W[n][k] x[m][k] - ...) + bias[n]
//         |    x    |
//         +---------+      Scales that change along K (groups of int4, 128 x 128 blocks) and the promotion of
//   +---+ +---------+      short fp8 sums are a fold, once a group: sum += scale product. With fp8 blocks and 128
//   | W | |    y    |      tokens x and W change places (swapped.cuh).
//   +---+ +---------+
#pragma once

#include "mm/wgmma/by_turns.cuh"
#include "mm/wgmma/consumer.cuh"
#include "mm/wgmma/group_factors.cuh"

namespace qao::mm::wgmma {

template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1)
    mm_kernel(typename K::Params p, const __grid_constant__ TensorMaps maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<K> ring{ptx::shared_address(shared)};
  if (threadIdx.x < K::kStage.count) {
    const uint32_t barrier = ring.arrived() + threadIdx.x * 8;
    tma::barrier_init(barrier, 1 + (K::kColumns                                            ? kHelperThreads
                                    : K::kScalesOperand || (K::kRowScales && p.groups > 1) ? 32
                                                                                           : 0));
    // By turns: a lane of each warp of one warpgroup, in both CTAs of the pair.
    tma::barrier_init(barrier + kBarrierBytes, K::kByTurns ? kTurnsCluster * 4 : warpgroups(p) * 128);
    if (K::kMakesScales) tma::barrier_init(barrier + 2 * kBarrierBytes, 1);
    tma::barrier_init_fence();
  }
  const int warp = ptx::warp_index() - K::kConsumerThreads / 32;
  if (warp == 0 && ptx::elect_one()) {
    tma::prefetch_map(K::kGrouped || p.m < K::kTokens ? &maps.last_x : &maps.x);
    if (K::kByTurns && p.copies_y) tma::prefetch_map(&maps.y);
  }
  if constexpr (K::kGrouped) {
    if (ptx::warp_index() == 0) {
      prefetch_routing(p.routing);
      ptx::wait_for_previous_kernel();  // whose the routing may be
      make_table<K::kTokens>(p.routing, ring.data + K::kStage.table);
    }
  }
  __syncthreads();
  if constexpr (K::kByTurns) ptx::cluster_barrier();  // what comes next arrives at barriers of the other CTA
  // All that comes from the kernel before, and the y that it may still read, is only touched after a wait for it: each
  // role waits when all else is ready. W may be its work too: up to there it went to L2 alone, where it cannot grow
  // stale.
  if (warp >= 0) {
    ptx::limit_registers<K::kProducerRegisters>();
    if (!K::kGrouped && warp == 1) prefetch_weight<K>(p, maps, ring.data);
    if (warp == 0) produce<K>(p, maps, ring);
    if (K::kColumns && warp > 0) produce_columns<K>(p, ring);
    if constexpr (K::kScalesOperand) {
      if (warp > 0) make_scales<K>(p, ring);
    } else if constexpr (K::kRowScales) {
      if (warp > 0 && p.groups > 1) make_group_factors<K>(p, ring);
    }
  } else {
    ptx::raise_registers<K::kConsumerRegisters>();
    const uint32_t epilogue = ring.data + K::kStage.epilogue;
    if constexpr (K::kByTurns) {
      consume_by_turns<K>(p, maps.y, ring, epilogue);
    } else if (warp + K::kConsumerThreads / 32 < warpgroups(p) * 4) {
      for_each_tile<K>(p, ring.data, [&](const Place& at) { Consumer<K>{p, maps.y, ring}.run(at, epilogue); });
    }
    if constexpr (K::kGrouped) {
      const int of_experts = all_of_experts(p.routing, ring.data + K::kStage.table).rows;
      write_rest(p.routing, of_experts, p.y, p.y_dtype, p.n, blockIdx.x, gridDim.x, K::kConsumerThreads);
    }
  }
}

}  // namespace qao::mm::wgmma
