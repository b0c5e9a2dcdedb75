// Instantiations of the portable W4A16 grouped GEMM for fp4 weights.
#include "gemm/sm80_mma/grouped_weight_only.cuh"
#include "gemm/sm80_mma/weight_only_fp4.cuh"

namespace qao::gemm::sm80_mma::grouped {
namespace {

template <int groups>
struct Fp4 {
  template <typename T, typename Tile>
  using Dense = weight_only::Fp4Cta<T, Tile, groups>;

  template <typename T, typename Tile, typename Cta>
  static __device__ __forceinline__ void main_loop(const Int4Params&, Cta& cta, int k_tiles, typename Cta::Sums& sum) {
    weight_only::fp4_main_loop<groups, T, Tile>(cta, 0, k_tiles, sum);
  }
};

}  // namespace

WeightOnlyKernel wfp4a16_kernel_of(int config, bool half, bool nvfp4) {
  return nvfp4 ? kernel_of<Fp4<4>>(config, half) : kernel_of<Fp4<2>>(config, half);
}

}  // namespace qao::gemm::sm80_mma::grouped
