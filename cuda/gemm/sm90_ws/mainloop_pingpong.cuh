// Ping-pong consumers: two warpgroups on alternating tiles, one in its mainloop, one in its epilogue.
//
// A warpgroup's tile is 128 rows of W, as two WGMMAs of 64, x 128 tokens. Such tiles load a third more bytes per FLOP
// than 128 x 256, so the two CTAs of a cluster, neighbors along N, multicast half of x each.
#pragma once

#include "gemm/sm90_ws/epilogue.cuh"
#include "gemm/sm90_ws/load.cuh"

namespace qao::gemm::sm90_ws {

// Named barriers that order the mainloops. A warpgroup may start once the other has waited for its last k-tile.
// Earlier, it could take the phase of an older pass over the ring for the current one.
constexpr int kTurnBarrier = 3;
__device__ __forceinline__ void wait_for_turn(int warpgroup) { ptx::named_barrier(kTurnBarrier + warpgroup, 256); }
__device__ __forceinline__ void pass_turn_to(int warpgroup) { ptx::named_arrive(kTurnBarrier + warpgroup, 256); }

template <typename K>
struct Turn {
  using Product = qao::wgmma::Product<typename K::T, K::kTokens>;

  const Params& p;
  Ring<K>& ring;
  typename K::Product sum[K::kRowParts][K::kTilesM][4];

  __device__ __forceinline__ void multiply(bool fresh) {
    const uint64_t x = qao::wgmma::descriptor(ring.address());
    const uint64_t weight = qao::wgmma::descriptor(ring.address() + K::kStage.x);
    qao::wgmma::fence();
#pragma unroll
    for (int step = 0; step < K::kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < K::kRowParts; ++half) {
        Product::run(sum[half], weight + half * (kWarpgroupRows * 128 / 16) + 2 * step, x + 2 * step,
                     step > 0 || !fresh);
      }
    }
    qao::wgmma::commit();
  }
  // Releases the stage in both CTAs of the cluster, since each fills half of its x.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < kPingPongCluster) tma::barrier_arrive_remotely(ptx::cluster_address(barrier, lane));
  }
  // Mainloop over one tile. `pass` is called once the last WGMMAs are issued.
  template <typename Pass>
  __device__ __forceinline__ void walk(int steps, const Pass& pass) {
    uint32_t unreleased = 0;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      tma::barrier_wait(ring.arrived(), ring.parity);
      multiply(i == 0);
      // Hand the tensor cores to the other warpgroup
      if (i + 1 == steps) pass();
      qao::wgmma::wait<1>();
      if (i > 0) release(unreleased);
      unreleased = ring.released();
      ring.advance();
    }
    qao::wgmma::wait<0>();
    release(unreleased);
  }
};

template <typename K>
__device__ __forceinline__ void consume_ping_pong(const Params& p, const CUtensorMap& y_map, Ring<K> ring,
                                                  uint32_t chunks) {
  const int warpgroup = ptx::warp_index() / 4, other = 1 - warpgroup, step = turn_step<K>(p),
            end = turns<K>(p, ring.data);
  const uint32_t rows = ring.data + K::kStage.rows + warpgroup * K::kRowParts * kRowScalesBytes,
                 tokens = ring.data + K::kStage.tokens + warpgroup * K::kStage.token_floats * K::kTokens * 4;
  // Start the second warpgroup one tile later
  if (warpgroup == 1) {
    pass_turn_to(other);
    ring.skip(p.k_tiles);
  }
  ptx::wait_for_previous_kernel();
  for (int turn = first_turn<K>(p) + warpgroup * step; turn < end; turn += 2 * step) {
    // Prologue
    const Place at = place<K>(p, ring.data, turn);
    const int row0 = at.row_block * K::kTile.rows, row_end = min(p.n, row0 + K::kTile.rows);
    const int64_t token0 = first_token<K>(at), token_end = last_token<K>(p, at);
    fetch_scales<K>(p, rows, tokens, at, row0);
    Turn<K> of{p, ring};
    // Mainloop
    wait_for_turn(warpgroup);
    of.walk(p.k_tiles, [&] {
      if (turn + step < end) pass_turn_to(other);
    });
    ring.skip(p.k_tiles);
    // Epilogue
#pragma unroll
    for (int half = 0; half < K::kRowParts; ++half) {
      const Target target{rows + half * kRowScalesBytes, tokens,  token0, token_end,
                          row0 + half * kWarpgroupRows,  row_end, 1,      at.weight};
      if (p.y_dtype == DType::kFloat32) {
        write_float_result<K>(p, of.sum[half], target);
      } else {
        write_half_result<K>(p, y_map, of.sum[half], chunks, target);
      }
    }
  }
  tma::wait_for_stores<0>();  // the TMA stores still read shared memory
  ptx::cluster_arrive();      // the other CTA may still arrive at mbarriers of this one
  ptx::cluster_wait();
}

}  // namespace qao::gemm::sm90_ws
