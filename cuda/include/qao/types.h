// Scalar types and the GPU facts a plan may depend on. Plain C++: no torch, no CUDA headers.
#pragma once

#include <cstdint>

#include "qao/status.h"

#if defined(__CUDACC__)
#define QAO_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define QAO_HOST_DEVICE inline
#endif

namespace qao {

enum class DType : int { kFloat32 = 0, kFloat16 = 1, kBFloat16 = 2 };

QAO_HOST_DEVICE constexpr int size_of(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

constexpr const char* name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
  }
  return "?";
}

// A plan is a pure function of the problem and of these numbers, so that every rank and every run chooses alike.
struct Gpu {
  int compute_capability = 0;    // 10 * major + minor: 80, 89, 90, ...
  int num_sms = 0;               // streaming multiprocessors
  int shared_bytes_per_cta = 0;  // opt-in limit of dynamic shared memory
};

// Facts of CUDA device `index`; queried once per device, then cached.
Status query_gpu(int index, Gpu* gpu);

}  // namespace qao
