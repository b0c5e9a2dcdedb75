// Wrappers of PTX instructions, one function each. Kernels contain no inline assembly.
#pragma once

#include <cstdint>

namespace qao::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Asynchronous 16-byte copy to shared memory.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}
// The same, zero-filled unless `exists`.
__device__ __forceinline__ void cp_async_16(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from), "r"(exists ? 16 : 0) : "memory");
}
// The same, predicated: no copy unless `wanted`, and no branch.
__device__ __forceinline__ void cp_async_16_if(bool wanted, uint32_t to, const void* from) {
  asm volatile("{.reg .pred p;\nsetp.ne.b32 p, %2, 0;\n@p cp.async.cg.shared.global [%0], [%1], 16;\n}\n" ::"r"(to),
               "l"(from), "r"(static_cast<int>(wanted))
               : "memory");
}
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;\n" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;\n" ::); }
// Waits until at most `pending` of this thread's copy groups are in flight.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(pending));
}

// Asynchronous 4-byte copy, zero-filled unless `exists`.
__device__ __forceinline__ void cp_async_4(uint32_t to, const void* from, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;\n" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

// Loads four 8 x 8 matrices of 16-bit elements; lane i addresses row i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// The same, transposed: lane i addresses column i % 8 of matrix i / 8.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&to)[4], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from)
               : "memory");
}

// Loads two matrices; lanes 0..15 address the rows.
__device__ __forceinline__ void ldmatrix_x2(uint32_t (&to)[2], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ void ldmatrix_x2_transposed(uint32_t (&to)[2], uint32_t from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];\n"
               : "=r"(to[0]), "=r"(to[1])
               : "r"(from)
               : "memory");
}

__device__ __forceinline__ uint4 load_shared_16(uint32_t from) {
  uint4 value;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
               : "r"(from)
               : "memory");
  return value;
}

__device__ __forceinline__ void store_shared_16(uint32_t to, uint4 value) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(value.x), "r"(value.y), "r"(value.z),
               "r"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_8(uint32_t to, uint2 value) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};\n" ::"r"(to), "r"(value.x), "r"(value.y) : "memory");
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t from) {
  uint2 value;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];\n" : "=r"(value.x), "=r"(value.y) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_4(uint32_t to, uint32_t value) {
  asm volatile("st.shared.u32 [%0], %1;\n" ::"r"(to), "r"(value) : "memory");
}
__device__ __forceinline__ uint16_t load_shared_2(uint32_t from) {
  uint16_t value;
  asm volatile("ld.shared.u16 %0, [%1];\n" : "=h"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ uint32_t load_shared_word(uint32_t from) {
  uint32_t value;
  asm volatile("ld.shared.u32 %0, [%1];\n" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];\n" : "=f"(value) : "r"(from) : "memory");
  return value;
}

__device__ __forceinline__ int load_shared_int(uint32_t from) {
  int value;
  asm volatile("ld.shared.s32 %0, [%1];\n" : "=r"(value) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t from) {
  float2 value;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];\n" : "=f"(value.x), "=f"(value.y) : "r"(from) : "memory");
  return value;
}
__device__ __forceinline__ float4 load_shared_float4(uint32_t from) {
  float4 value;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_shared_float(uint32_t to, float value) {
  asm volatile("st.shared.f32 [%0], %1;\n" ::"r"(to), "f"(value) : "memory");
}

// Programmatic dependent launch (sm_90): allow the next kernel to start, and wait for the previous one's writes.
__device__ __forceinline__ void launch_dependents() {
  asm volatile("griddepcontrol.launch_dependents;\n" ::: "memory");
}
__device__ __forceinline__ void wait_for_previous_kernel() { asm volatile("griddepcontrol.wait;\n" ::: "memory"); }
// Both, for kernels that are also compiled for older GPUs (common/launch.h: is_hopper_code). Signaling before the wait
// would start a whole chain of such kernels at once, and the waiting ones would occupy SMs that the running one needs.
__device__ __forceinline__ void wait_then_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  wait_for_previous_kernel();
  launch_dependents();
#endif
}
// Prefetches `bytes` (a multiple of 16) into L2 (sm_90). A hint: it does not affect the result of later loads.
__device__ __forceinline__ void prefetch_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;\n" ::"l"(from), "r"(bytes) : "memory");
}
// Prefetches the L2 line that holds this byte, without TMA.
__device__ __forceinline__ void prefetch_l2_line(const void* at) {
  asm volatile("prefetch.global.L2 [%0];\n" ::"l"(at) : "memory");
}

// Clusters (sm_90): CTA rank, barrier of all threads that still run, and distributed shared memory. `cluster_address`
// maps an address of this CTA to the same address in CTA `rank`.
__device__ __forceinline__ int cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %cluster_ctarank;\n" : "=r"(rank));
  return static_cast<int>(rank);
}
// Index of this cluster in the grid, and the number of clusters. Without clusters, each CTA is a cluster.
__device__ __forceinline__ int cluster_index() {
  uint32_t index;
  asm volatile("mov.u32 %0, %clusterid.x;\n" : "=r"(index));
  return static_cast<int>(index);
}
__device__ __forceinline__ int cluster_count() {
  uint32_t count;
  asm volatile("mov.u32 %0, %nclusterid.x;\n" : "=r"(count));
  return static_cast<int>(count);
}
__device__ __forceinline__ void cluster_barrier() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;\n" ::: "memory");
}
// The barrier in two halves, relaxed: does not order preceding memory accesses.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory"); }
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared_address, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;\n" : "=r"(address) : "r"(shared_address), "r"(rank));
  return address;
}
__device__ __forceinline__ float4 load_cluster_float4(uint32_t from) {
  float4 value;
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];\n"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "r"(from)
               : "memory");
  return value;
}
__device__ __forceinline__ void store_cluster_float4(uint32_t to, float4 value) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "f"(value.x), "f"(value.y),
               "f"(value.z), "f"(value.w)
               : "memory");
}
__device__ __forceinline__ void store_cluster_float2(uint32_t to, float2 value) {
  asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};\n" ::"r"(to), "f"(value.x), "f"(value.y) : "memory");
}

// Stores four 8 x 8 matrices of 16-bit elements: lane i addresses row i % 8 of matrix i / 8 (sm_90).
__device__ __forceinline__ void stmatrix_x4(uint32_t to, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
// The same, transposed: lane i addresses column i % 8 of matrix i / 8.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t to, const uint32_t (&from)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(from[0]),
               "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}

// Hides the computation of `value` from the compiler, so that it keeps the register instead of recomputing it.
__device__ __forceinline__ uint32_t opaque(uint32_t value) {
  asm volatile("" : "+r"(value));
  return value;
}
__device__ __forceinline__ const uint8_t* opaque(const uint8_t* value) {
  asm volatile("" : "+l"(value));
  return value;
}

// Address of a kernel's dynamic shared memory. Without `opaque` it may be computed again in each iteration of a
// mainloop, from a special register that takes long to read.
__device__ __forceinline__ uint32_t shared_memory(const void* memory) { return opaque(shared_address(memory)); }

// (a & b) | c in one instruction.
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

__device__ __forceinline__ uint32_t and_xor(uint32_t a, uint32_t b, uint32_t c) {
  uint32_t result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;\n" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// Maximum; NaN if either operand is NaN.
__device__ __forceinline__ float max_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;\n" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// Pairwise maximum of the magnitudes of bfloat16 pairs; ignores NaN.
__device__ __forceinline__ uint32_t max_of_magnitudes(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("{.reg .b32 p, q;\nabs.bf16x2 p, %1;\nabs.bf16x2 q, %2;\nmax.bf16x2 %0, p, q;\n}\n"
      : "=r"(result)
      : "r"(a), "r"(b));
  return result;
}
// Converts two floats to a float16 pair.
__device__ __forceinline__ uint32_t to_float16(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;\n" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Forces the compiler to compute the values before this point.
__device__ __forceinline__ void pin(uint32_t (&values)[4]) {
  asm volatile("" : "+r"(values[0]), "+r"(values[1]), "+r"(values[2]), "+r"(values[3]));
}
__device__ __forceinline__ void pin(uint4& value) {
  asm volatile("" : "+r"(value.x), "+r"(value.y), "+r"(value.z), "+r"(value.w));
}

// Index of this thread's warp, broadcast from one lane, so that the compiler knows that branches on it do not diverge.
__device__ __forceinline__ int warp_index() { return __shfl_sync(0xFFFFFFFFu, static_cast<int>(threadIdx.x / 32), 0); }
// True in one lane of a converged warp (sm_90).
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile("{.reg .pred p;\nelect.sync _|p, 0xFFFFFFFF;\nselp.b32 %0, 1, 0, p;}\n" : "=r"(elected));
  return elected != 0;
}

// Sets the registers per thread of this warpgroup (sm_90a).
template <int count>
__device__ __forceinline__ void limit_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(count));
}

// Barrier of `threads` threads that use the same `id`.
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}
// Arrives at that barrier without waiting.
__device__ __forceinline__ void named_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;\n" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace qao::ptx
