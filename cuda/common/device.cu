#include <array>
#include <atomic>

#include "common/check.h"
#include "qao/device.h"
#include "qao/types.h"

namespace qao {

constexpr int kMaxGpus = 64;

int current_gpu() {
  int index = -1;
  return cudaGetDevice(&index) == cudaSuccess ? index : -1;
}

int64_t largest_window() {
  static std::array<std::atomic<int64_t>, kMaxGpus> cache;  // and one more: 0 is not asked yet
  const int index = current_gpu();
  if (index < 0 || index >= kMaxGpus) return 0;
  if (cache[index] == 0) {  // racing threads write the same value
    int bytes = 0;
    cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxAccessPolicyWindowSize, index);
    cache[index] = int64_t{bytes} + 1;
  }
  return cache[index] - 1;
}

Status query_gpu(int index, Gpu* gpu) {
  struct Entry {
    std::atomic<bool> known{false};
    Gpu gpu;
  };
  static std::array<Entry, kMaxGpus> cache;
  if (index < 0 || index >= kMaxGpus)
    return Status::error("CUDA device index " + std::to_string(index) + " out of range");
  Entry& entry = cache[index];
  if (entry.known.load(std::memory_order_acquire)) {
    *gpu = entry.gpu;
    return {};
  }
  int major = 0, minor = 0, sms = 0, shared = 0;
  for (const auto& [value, attribute] :
       {std::pair{&major, cudaDevAttrComputeCapabilityMajor}, std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
        std::pair{&sms, cudaDevAttrMultiProcessorCount}, std::pair{&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin}}) {
    if (Status status = cuda_status(cudaDeviceGetAttribute(value, attribute, index), "reading device attributes");
        !status.ok()) {
      return status;
    }
  }
  *gpu = {10 * major + minor, sms, shared};
  entry.gpu = *gpu;  // racing threads write the same values
  entry.known.store(true, std::memory_order_release);
  return {};
}

}  // namespace qao
