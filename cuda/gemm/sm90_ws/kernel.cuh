// Persistent, warp-specialized WGMMA kernel: W is the 64-row A operand, x the B operand.
//
// A producer thread keeps a ring of pipeline stages filled by TMA, one k-tile of x and W each. Two to four consumer
// warpgroups own 64 rows of W each. int8 x int8 and fp8 x fp8 run from shared memory. Where W needs conversion (int4,
// or 8 bits with float x), a warpgroup converts the next k-tile in registers while the tensor cores work on the current
// one. CTAs are persistent: a tile's first k-tiles load during the previous epilogue.
//
//            tokens
//         +---------+      y[m][n] = x_scale[m] (row_scale[n] sum over k of W[n][k] x[m][k] - ...) + bias[n]
//         |    x    |
//         +---------+      Scales that change along K (groups of int4, 128 x 128 blocks) and fp8 partial sums are
//   +---+ +---------+      promoted, once per group: sum += scale product. fp8 blocks with 64 or 128 tokens use
//   | W | |    y    |      swap-AB (mainloop_swap_ab.cuh).
//   +---+ +---------+
#pragma once

#include "gemm/sm90_ws/group_factors.cuh"
#include "gemm/sm90_ws/mainloop.cuh"
#include "gemm/sm90_ws/mainloop_pingpong.cuh"

namespace qao::gemm::sm90_ws {

template <typename K>
__device__ __forceinline__ void run_roles(const typename K::Params& p, const typename K::Maps& maps) {
  extern __shared__ __align__(1024) uint8_t shared[];
  Ring<K> ring{ptx::shared_address(shared)};
  // Initialize mbarriers
  if (threadIdx.x < K::kStage.count) {
    const uint32_t barrier = ring.arrived() + threadIdx.x * 8;
    tma::barrier_init(barrier, 1 + (K::kColumns                                           ? kHelperThreads
                                    : K::kMakesScales && (!K::kRowScales || p.groups > 1) ? 32
                                                                                          : 0));
    // Ping-pong: one lane per warp of one warpgroup, in both CTAs of the cluster.
    tma::barrier_init(barrier + kBarrierBytes, K::kPingPong ? kPingPongCluster * 4 : warpgroups(p) * 128);
    if (K::kMakesScales) tma::barrier_init(barrier + 2 * kBarrierBytes, 1);
    tma::barrier_init_fence();
  }
  const int warp = ptx::warp_index() - K::kConsumerThreads / 32;
  // Prefetch descriptors, and build the table of experts
  if (warp == 0 && ptx::elect_one()) {
    tma::prefetch_map(K::kGrouped || p.m < K::kTokens ? &maps.last_x : &maps.x);
    if (K::kPingPong && p.copies_y) tma::prefetch_map(&maps.y);
  }
  if constexpr (K::kGrouped) {
    if (ptx::warp_index() == 0) {
      prefetch_routing(p.routing);
      ptx::wait_for_previous_kernel();  // it may write the routing
      make_table<K::kTokens>(p.routing, ring.data + K::kStage.table);
    }
  }
  __syncthreads();
  if constexpr (K::kPingPong) ptx::cluster_barrier();  // other CTAs may arrive at this CTA's mbarriers from here on
  // PDL: each role prepares all it can, then waits for the previous kernel before it reads that kernel's outputs or
  // writes y. W may be such an output too: before the wait it is prefetched into L2 only, which stays coherent.
  if (warp >= 0) {
    ptx::limit_registers<K::kProducerRegisters>();
    if (!K::kGrouped && warp == 1) prefetch_weight<K>(p, maps, ring.data);
    if (warp == 0) produce<K>(p, maps, ring);
    if (K::kColumns && warp > 0) produce_columns<K>(p, ring);
    if constexpr (K::kScalesOperand) {
      if (warp > 0) make_scales<K>(p, ring);
    } else if constexpr (K::kPreparesGroups) {
      if (warp > 0) prepare_groups<K>(p, ring);
    } else if constexpr (K::kRowScales) {
      if (warp > 0 && p.groups > 1) make_group_factors<K>(p, ring);
    }
  } else {
    ptx::raise_registers<K::kConsumerRegisters>();
    const uint32_t epilogue = ring.data + K::kStage.epilogue;
    if constexpr (K::kPingPong) {
      consume_ping_pong<K>(p, maps.y, ring, epilogue);
    } else if (warp + K::kConsumerThreads / 32 < warpgroups(p) * 4) {
      for_each_tile<K>(p, ring.data, [&](const Place& at) { Consumer<K>{p, maps.y, ring}.run(at, epilogue); });
    }
    if constexpr (K::kGrouped) {
      const int of_experts = all_of_experts(p.routing, ring.data + K::kStage.table).rows;
      write_rest(p.routing, of_experts, p.y, p.y_dtype, p.n, blockIdx.x, gridDim.x, K::kConsumerThreads);
    }
  }
}

template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1)
    sm90_ws(typename K::Params p, const __grid_constant__ TensorMaps maps) {
  run_roles<K>(p, maps);
}
// Several weights of one x. K: MergedKernel.
template <typename K>
__global__ void __launch_bounds__(K::kThreads, 1)
    sm90_ws_merged(const __grid_constant__ MergedParams p, const __grid_constant__ MergedTensorMaps maps) {
  run_roles<K>(p, maps);
}

}  // namespace qao::gemm::sm90_ws
