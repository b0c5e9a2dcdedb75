// Hopper's copy engine: tensor tiles from global to shared memory, completion counted by an mbarrier.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qao::tma {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine; a __syncthreads makes them so to the other threads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// One arrival that also announces `bytes` to come.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// This thread's arrival, once its cp.async copies so far are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// An arrival at the same barrier of CTA `rank` of the cluster, which publishes no writes: at the scope of a cluster
// that costs a memory fence.
__device__ __forceinline__ void barrier_arrive_at(uint32_t barrier, int rank) {
  asm volatile(
      "{.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];}\n" ::"r"(barrier),
      "r"(rank)
      : "memory");
}
// Returns when the phase of this parity is complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, int parity) {
  asm volatile(
      "{.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;}\n" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// The box at (c0, c1, c2) of a three-dimensional tensor; what lies outside arrives as zero.
__device__ __forceinline__ void load_3d(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::
          "r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}

// The same, to the same addresses and barriers of all CTAs of the cluster whose bit is set.
__device__ __forceinline__ void load_3d_multicast(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2,
                                                  uint32_t barrier, uint16_t ctas) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;\n" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(ctas)
      : "memory");
}

}  // namespace qao::tma
