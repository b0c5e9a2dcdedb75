// Opt-in to more than 48 KB of dynamic shared memory.
#pragma once

#include <array>
#include <cstdint>

#include "common/check.h"

namespace qao {

// Raises the limit of `kernel` to the maximum of the current device; launches request less. Cached per thread and
// kernel, since the call is slow.
inline Status grant_shared_memory(const void* kernel) {
  struct Granted {
    const void* kernel;
    int device;
  };
  static thread_local std::array<Granted, 256> cache{};
  int device = 0;
  if (Status status = cuda_status(cudaGetDevice(&device), "asking for the current device"); !status.ok()) return status;
  Granted& entry = cache[(reinterpret_cast<uintptr_t>(kernel) / 16 + device) % cache.size()];
  if (entry.kernel == kernel && entry.device == device) return {};

  int most = 0;
  cudaFuncAttributes attributes{};
  cudaError_t error = cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, kernel);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 most - static_cast<int>(attributes.sharedSizeBytes));
  }
  if (error != cudaSuccess) return cuda_status(error, "reserving shared memory");
  entry = {kernel, device};
  return {};
}

}  // namespace qao
