// The CUDA device of the calling thread. Only in builds with CUDA.
#pragma once

namespace qao {

int current_gpu();  // index; -1 if there is none

}  // namespace qao
