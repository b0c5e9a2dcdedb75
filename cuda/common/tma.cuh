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
// At a barrier of another CTA of the cluster: `barrier` is a cluster address.
__device__ __forceinline__ void barrier_arrive_remotely(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// This thread's arrival, once its cp.async copies so far are complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
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

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];\n" ::"l"(map) : "memory");
}
// Brings a box into the L2 cache. A hint: it cannot change what a later load sees.
__device__ __forceinline__ void prefetch_3d(const CUtensorMap* map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];\n" ::"l"(map), "r"(c0), "r"(c1), "r"(c2)
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

// The same box to the same place in the shared memory of the first `ctas` of the cluster, and to the barrier there.
__device__ __forceinline__ void load_3d_to_all(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2,
                                               uint32_t barrier, int ctas) {
  const uint16_t mask = static_cast<uint16_t>((1u << ctas) - 1);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;\n" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(mask)
      : "memory");
}

// What ordinary stores left in shared memory becomes visible to the copy engine.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// A box from shared memory to (c0, c1, c2); what lies outside the tensor is not written. close_store() ends it.
__device__ __forceinline__ void store_3d(const CUtensorMap* map, uint32_t from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
               "r"(from), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
// What the thread has stored since the last call counts as one store for wait_for_stores(), nothing too.
__device__ __forceinline__ void close_store() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Until at most `pending` of this thread's stores have not read their box yet.
template <int pending>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(pending) : "memory");
}

}  // namespace qao::tma
