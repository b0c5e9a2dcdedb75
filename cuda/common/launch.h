// Kernel launches with attributes: clusters, programmatic dependent launch, L2 access policy.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "common/check.h"
#include "qao/device.h"

namespace qao {

struct Launch {
  dim3 grid, cta;
  cudaStream_t stream;
  size_t shared_bytes = 0;
  int cluster = 1;          // CTAs per cluster, along x of the grid
  bool overlapped = false;  // programmatic dependent launch; the kernel must execute griddepcontrol.wait
  // Memory that the kernel reads once. Its lines are evicted from L2 first, which keeps data prefetched for later
  // kernels.
  const void* streamed = nullptr;
  int64_t streamed_bytes = 0;
};

template <typename... Parameters>
Status launch_kernel(const Launch& launch, const char* doing, void (*kernel)(Parameters...),
                     const Parameters&... parameters) {
  cudaLaunchAttribute attributes[3]{};
  cudaLaunchConfig_t config{};
  config.gridDim = launch.grid;
  config.blockDim = launch.cta;
  config.dynamicSmemBytes = launch.shared_bytes;
  config.stream = launch.stream;
  config.attrs = attributes;
  if (launch.overlapped) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
  }
  if (launch.cluster > 1) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeClusterDimension;
    attribute.val.clusterDim = {static_cast<unsigned>(launch.cluster), 1, 1};
  }
  if (const int64_t most = launch.streamed_bytes > 0 ? largest_window() : 0; most > 0) {
    cudaLaunchAttribute& attribute = attributes[config.numAttrs++];
    attribute.id = cudaLaunchAttributeAccessPolicyWindow;
    cudaAccessPolicyWindow& window = attribute.val.accessPolicyWindow;
    window.base_ptr = const_cast<void*>(launch.streamed);
    window.num_bytes = static_cast<size_t>(std::min(launch.streamed_bytes, most));
    window.hitRatio = 1;
    window.hitProp = cudaAccessPropertyStreaming;
    window.missProp = cudaAccessPropertyNormal;
  }
  return cuda_status(cudaLaunchKernelEx(&config, kernel, parameters...), doing);
}

// Whether `kernel`, from a file compiled for several architectures, runs as sm_90 code on the current device. Only that
// code waits for the previous kernel (PDL). Cached per thread, since the query is slow.
inline bool is_hopper_code(const void* kernel) {
  struct Known {
    const void* kernel;
    int device;
    bool hopper;
  };
  static thread_local std::array<Known, 256> cache{};
  int device = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  Known& entry = cache[(reinterpret_cast<uintptr_t>(kernel) / 16 + device) % cache.size()];
  if (entry.kernel != kernel || entry.device != device) {
    cudaFuncAttributes attributes{};
    if (cudaFuncGetAttributes(&attributes, kernel) != cudaSuccess) return false;
    entry = {kernel, device, attributes.ptxVersion >= 90};
  }
  return entry.hopper;
}

}  // namespace qao
