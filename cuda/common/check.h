// CUDA runtime errors as Status.
#pragma once

#include <cuda_runtime.h>

#include <string>

#include "qao/status.h"

namespace qao {

inline Status cuda_status(cudaError_t error, const char* doing) {
  if (error == cudaSuccess) return {};
  return Status::error(std::string("CUDA failed while ") + doing + ": " + cudaGetErrorString(error));
}

// Status of the preceding launch. Clears the error.
inline Status launch_status(const char* kernel) { return cuda_status(cudaGetLastError(), kernel); }

}  // namespace qao
