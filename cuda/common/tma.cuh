// TMA (cp.async.bulk.tensor) loads and stores, and the mbarriers that track them.
#pragma once

#include <cuda.h>

#include <cstdint>

namespace qao::tma {

__device__ __forceinline__ void barrier_init(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized mbarriers visible to TMA. Other threads need a __syncthreads.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}
// Arrives and adds `bytes` to the expected transaction count.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives at an mbarrier of another CTA of the cluster: `barrier` is a cluster address.
__device__ __forceinline__ void barrier_arrive_remotely(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];\n" ::"r"(barrier) : "memory");
}
// Arrives for this thread once its preceding cp.async copies complete.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];\n" ::"r"(barrier) : "memory");
}
// Waits until the phase with this parity completes.
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
// Prefetches a box into L2. A hint: it does not affect the result of later loads.
__device__ __forceinline__ void prefetch_3d(const CUtensorMap* map, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.prefetch.tensor.3d.L2.global [%0, {%1, %2, %3}];\n" ::"l"(map), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}

// Loads the box at (c0, c1, c2) of a three-dimensional tensor. Out-of-bounds elements are zero.
__device__ __forceinline__ void load_3d(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];\n" ::
          "r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier)
      : "memory");
}

// Multicast load: the box is written to the same address, and signals the same mbarrier, in the first `ctas` of the
// cluster.
__device__ __forceinline__ void load_3d_to_all(uint32_t to, const CUtensorMap* map, int c0, int c1, int c2,
                                               uint32_t barrier, int ctas) {
  const uint16_t mask = static_cast<uint16_t>((1u << ctas) - 1);
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;\n" ::"r"(to),
      "l"(map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "h"(mask)
      : "memory");
}

// Makes this thread's shared-memory stores visible to TMA.
__device__ __forceinline__ void fence_stores() { asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory"); }
// Stores a box from shared memory to (c0, c1, c2), clipped to the tensor. Commit with close_store().
__device__ __forceinline__ void store_3d(const CUtensorMap* map, uint32_t from, int c0, int c1, int c2) {
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%0, {%2, %3, %4}], [%1];\n" ::"l"(map),
               "r"(from), "r"(c0), "r"(c1), "r"(c2)
               : "memory");
}
// Commits the stores since the last call as one group for wait_for_stores(); the group may be empty.
__device__ __forceinline__ void close_store() { asm volatile("cp.async.bulk.commit_group;\n" ::: "memory"); }
// Waits until at most `pending` groups of this thread still read shared memory.
template <int pending>
__device__ __forceinline__ void wait_for_stores() {
  asm volatile("cp.async.bulk.wait_group.read %0;\n" ::"n"(pending) : "memory");
}

}  // namespace qao::tma
