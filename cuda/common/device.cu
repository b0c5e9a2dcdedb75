// Cached device properties.
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

namespace {

// Properties of a GPU, cached per device.
struct Facts {
  Gpu gpu;
  int64_t largest_window;
};

Status facts_of(int index, Facts* facts) {
  struct Entry {
    std::atomic<bool> known{false};
    Facts facts;
  };
  static std::array<Entry, kMaxGpus> cache;
  if (index < 0 || index >= kMaxGpus)
    return Status::error("CUDA device index " + std::to_string(index) + " out of range");
  Entry& entry = cache[index];
  if (entry.known.load(std::memory_order_acquire)) {
    *facts = entry.facts;
    return {};
  }
  int major = 0, minor = 0, sms = 0, shared = 0, window = 0;
  for (const auto& [value, attribute] :
       {std::pair{&major, cudaDevAttrComputeCapabilityMajor}, std::pair{&minor, cudaDevAttrComputeCapabilityMinor},
        std::pair{&sms, cudaDevAttrMultiProcessorCount}, std::pair{&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin},
        std::pair{&window, cudaDevAttrMaxAccessPolicyWindowSize}}) {
    if (Status status = cuda_status(cudaDeviceGetAttribute(value, attribute, index), "reading device attributes");
        !status.ok()) {
      return status;
    }
  }
  *facts = {{10 * major + minor, sms, shared}, window};
  entry.facts = *facts;  // racing threads write the same values
  entry.known.store(true, std::memory_order_release);
  return {};
}

}  // namespace

Status query_gpu(int index, Gpu* gpu) {
  Facts facts;
  if (Status status = facts_of(index, &facts); !status.ok()) return status;
  *gpu = facts.gpu;
  return {};
}

int64_t largest_window() {
  Facts facts;
  return facts_of(current_gpu(), &facts).ok() ? facts.largest_window : 0;
}

}  // namespace qao
