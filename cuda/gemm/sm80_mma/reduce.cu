// Reduction of split-K partial sums of the mma.sync kernels.
#include "common/check.h"
#include "gemm/launch.h"
#include "gemm/sm80_mma/epilogue.cuh"
#include "gemm/sm80_mma/launch.h"

namespace qao::gemm::sm80_mma {

Status reduce(const Params& params, cudaStream_t stream) {
  Epilogue last = params.epilogue;
  last.partials = nullptr;
  const Fractions fractions = fractions_of(params);
  const auto kernel = fractions.x_sums != nullptr ? sm80_mma_reduce<true> : sm80_mma_reduce<false>;
  kernel<<<blocks_of(last.m * ((last.n + 3) / 4), 256), 256, 0, stream>>>(params.epilogue.partials, params.split_k,
                                                                          last, fractions);
  return launch_status("launching sm80_mma_reduce");
}

}  // namespace qao::gemm::sm80_mma
