// Instantiations of the portable W4A16 grouped GEMM for fp4 weights.
#include "mm/mma_sync/float_fp4.cuh"
#include "mm/mma_sync/grouped_float.cuh"

namespace qao::mm::mma_sync::grouped {
namespace {

template <int groups>
struct Fp4 {
  template <typename T, typename Tile>
  using Dense = float_int4::Fp4Cta<T, Tile, groups>;

  template <typename T, typename Tile, typename Cta>
  static __device__ __forceinline__ void main_loop(const Int4Params&, Cta& cta, int k_tiles, typename Cta::Sums& sum) {
    float_int4::fp4_main_loop<groups, T, Tile>(cta, 0, k_tiles, sum);
  }
};

}  // namespace

FloatInt4Kernel float_fp4_kernel_of(int config, bool half, bool nvfp4) {
  return nvfp4 ? kernel_of<Fp4<4>>(config, half) : kernel_of<Fp4<2>>(config, half);
}

}  // namespace qao::mm::mma_sync::grouped
