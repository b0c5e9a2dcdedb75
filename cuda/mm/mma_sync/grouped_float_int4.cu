// Instantiations of the portable W4A16 grouped GEMM for int4 weights.
#include "mm/mma_sync/grouped_float.cuh"

namespace qao::mm::mma_sync::grouped {
namespace {

template <bool zeros>
struct Int4 {
  template <typename T, typename Tile>
  using Dense = float_int4::Cta<T, Tile, zeros>;

  template <typename T, typename Tile, typename Cta>
  static __device__ __forceinline__ void main_loop(const Int4Params& p, Cta& cta, int k_tiles,
                                                   typename Cta::Sums& sum) {
    if (p.group_shift < 0) {
      float_int4::main_loop<true, T, Tile>(cta, 0, k_tiles, sum);
    } else {
      float_int4::main_loop<false, T, Tile>(cta, 0, k_tiles, sum);
    }
  }
};

}  // namespace

FloatInt4Kernel float_int4_kernel_of(int config, bool half, bool zeros) {
  return zeros ? kernel_of<Int4<true>>(config, half) : kernel_of<Int4<false>>(config, half);
}

}  // namespace qao::mm::mma_sync::grouped
