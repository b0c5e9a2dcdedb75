// Queries on the CUDA device of the calling thread. Only in builds with CUDA.
#pragma once

#include <cstdint>

namespace qao {

int current_gpu();  // index, or -1

// Largest access policy window for streaming reads, in bytes; 0 if unsupported. Cached per device.
int64_t largest_window();

}  // namespace qao
