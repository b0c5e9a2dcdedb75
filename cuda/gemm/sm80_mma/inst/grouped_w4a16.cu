// Instantiations of the portable W4A16 grouped GEMM for int4 weights.
#include "gemm/sm80_mma/grouped_weight_only.cuh"

namespace qao::gemm::sm80_mma::grouped {
namespace {

template <bool zeros>
struct Int4 {
  template <typename T, typename Tile>
  using Dense = weight_only::Cta<T, Tile, zeros>;

  template <typename T, typename Tile, typename Cta>
  static __device__ __forceinline__ void main_loop(const Int4Params& p, Cta& cta, int k_tiles,
                                                   typename Cta::Sums& sum) {
    if (p.group_shift < 0) {
      weight_only::main_loop<true, T, Tile>(cta, 0, k_tiles, sum);
    } else {
      weight_only::main_loop<false, T, Tile>(cta, 0, k_tiles, sum);
    }
  }
};

}  // namespace

WeightOnlyKernel w4a16_kernel_of(int config, bool half, bool zeros) {
  return zeros ? kernel_of<Int4<true>>(config, half) : kernel_of<Int4<false>>(config, half);
}

}  // namespace qao::gemm::sm80_mma::grouped
