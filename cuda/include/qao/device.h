// The CUDA device of the calling thread. Only in builds with CUDA.
#pragma once

#include <cstdint>

namespace qao {

int current_gpu();  // index; -1 if there is none

// Bytes that a launch on it may declare to be read once; 0 if none. Asked once per device, then cached.
int64_t largest_window();

}  // namespace qao
