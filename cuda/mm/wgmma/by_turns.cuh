// Two consumer warpgroups that take tiles of y by turns: while one multiplies, the other scales and stores its last
// tile and makes ready for the next. The tensor cores never wait for an epilogue. A warpgroup has all 128 rows of W, as
// two products of 64, and 128 tokens. Such tiles need a third more bytes a product than 128 x 256, so the two CTAs of a
// cluster, neighbours along W, bring half of x each to both.
#pragma once

#include "mm/wgmma/epilogue.cuh"
#include "mm/wgmma/producer.cuh"

namespace qao::mm::wgmma {

// Named barriers of the two warpgroups: a warpgroup may multiply once the other has seen the last of its K-tiles
// arrive. Before that it would take the parity of a round long gone for this one's.
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
  // Both CTAs of the pair wait for the stage, since each fills half of its x.
  __device__ __forceinline__ void release(uint32_t barrier) const {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    if (lane < kTurnsCluster) tma::barrier_arrive_remotely(ptx::cluster_address(barrier, lane));
  }
  // `pass` is called when the last products are issued.
  template <typename Pass>
  __device__ __forceinline__ void walk(int steps, const Pass& pass) {
    uint32_t unreleased = 0;
#pragma unroll 1
    for (int i = 0; i < steps; ++i) {
      tma::barrier_wait(ring.arrived(), ring.parity);
      multiply(i == 0);
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
__device__ __forceinline__ void consume_by_turns(const Params& p, const CUtensorMap& y_map, Ring<K> ring,
                                                 uint32_t chunks) {
  const int warpgroup = ptx::warp_index() / 4, other = 1 - warpgroup, step = turn_step<K>(p),
            end = turns<K>(p, ring.data);
  const uint32_t rows = ring.data + K::kStage.rows + warpgroup * K::kRowParts * kRowScalesBytes,
                 tokens = ring.data + K::kStage.tokens + warpgroup * K::kStage.token_floats * K::kTokens * 4;
  if (warpgroup == 1) {
    pass_turn_to(other);
    ring.skip(p.k_tiles);
  }
  ptx::wait_for_previous_kernel();
  for (int turn = first_turn<K>(p) + warpgroup * step; turn < end; turn += 2 * step) {
    const Place at = place<K>(p, ring.data, turn);
    const int row0 = at.row_block * K::kTile.rows, row_end = min(p.n, row0 + K::kTile.rows);
    const int64_t token0 = first_token<K>(at), token_end = last_token<K>(p, at);
    fetch_scales<K>(p, rows, tokens, at, row0);
    Turn<K> of{p, ring};
    wait_for_turn(warpgroup);
    of.walk(p.k_tiles, [&] {
      if (turn + step < end) pass_turn_to(other);
    });
    ring.skip(p.k_tiles);
#pragma unroll
    for (int half = 0; half < K::kRowParts; ++half) {
      const Target target{rows + half * kRowScalesBytes, tokens,  token0, token_end,
                          row0 + half * kWarpgroupRows,  row_end, 1};
      if (p.y_dtype == DType::kFloat32) {
        write_float_result<K>(p, of.sum[half], target);
      } else {
        write_half_result<K>(p, y_map, of.sum[half], chunks, target);
      }
    }
  }
  tma::wait_for_stores<0>();  // which still read shared memory
  ptx::cluster_arrive();      // the other CTA may still arrive at barriers here
  ptx::cluster_wait();
}

}  // namespace qao::mm::wgmma
