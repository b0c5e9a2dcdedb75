// Reduction of split-K partial sums of the mma.sync kernels.
#include "common/check.h"
#include "gemm/launch.h"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/launch.h"

namespace qao::gemm::sm80_mma {

Status reduce(const Epilogue& of_partials, int splits, cudaStream_t stream) {
  Epilogue last = of_partials;
  last.partials = nullptr;
  sm80_mma_reduce<<<blocks_of(last.m * ((last.n + 3) / 4), 256), 256, 0, stream>>>(of_partials.partials, splits, last);
  return launch_status("launching sm80_mma_reduce");
}

}  // namespace qao::gemm::sm80_mma
