#include "mm/mma_sync/float_fp4.cuh"
#include "mm/mma_sync/grouped_float.cuh"

namespace qao::mm::mma_sync::grouped {
namespace {

template <typename T, typename Tile, int groups>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    fp4_kernel(const __grid_constant__ Int4Params p, const __grid_constant__ Routing r) {
  using Dense = float_int4::Fp4Cta<T, Tile, groups>;
  multiply_rows<T, Tile, Dense>(p, r, [](auto& cta, int k_tiles, typename Dense::Sums& sum) {
    float_int4::fp4_main_loop<groups, T, Tile>(cta, 0, k_tiles, sum);
  });
}

template <typename T, int groups>
constexpr std::array kKernels = {
#define QAO_TILE(rows, ...) static_cast<FloatInt4Kernel>(&fp4_kernel<T, float_int4::Tile<__VA_ARGS__>, groups>),
#include "mm/mma_sync/grouped_float_int4_tiles.inc"
#undef QAO_TILE
};

}  // namespace

FloatInt4Kernel float_fp4_kernel_of(int config, bool half, bool nvfp4) {
  if (half) return nvfp4 ? kKernels<__half, 4>[config] : kKernels<__half, 2>[config];
  return nvfp4 ? kKernels<__nv_bfloat16, 4>[config] : kKernels<__nv_bfloat16, 2>[config];
}

}  // namespace qao::mm::mma_sync::grouped
