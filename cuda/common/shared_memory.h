// Dynamic shared memory beyond 48 KB, which a kernel must be granted before it is launched with it.
#pragma once

#include <array>
#include <cstdint>

#include "common/check.h"

namespace qao {

// Allows `kernel` as much dynamic shared memory as a CTA of the current device can have; a launch then asks for what it
// needs. The call is slow, so every thread remembers for which kernels it was made.
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
