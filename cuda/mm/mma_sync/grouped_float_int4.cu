#include "mm/mma_sync/grouped_float.cuh"

namespace qao::mm::mma_sync::grouped {
namespace {

template <typename T, typename Tile, bool zeros>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm)
    int4_kernel(const __grid_constant__ Int4Params p, const __grid_constant__ Routing r) {
  using Dense = float_int4::Cta<T, Tile, zeros>;
  multiply_rows<T, Tile, Dense>(p, r, [&](auto& cta, int k_tiles, typename Dense::Sums& sum) {
    if (p.group_shift < 0) {
      float_int4::main_loop<true, T, Tile>(cta, 0, k_tiles, sum);
    } else {
      float_int4::main_loop<false, T, Tile>(cta, 0, k_tiles, sum);
    }
  });
}

template <typename T, bool zeros>
constexpr std::array kKernels = {
#define QAO_TILE(rows, ...) static_cast<FloatInt4Kernel>(&int4_kernel<T, float_int4::Tile<__VA_ARGS__>, zeros>),
#include "mm/mma_sync/grouped_float_int4_tiles.inc"
#undef QAO_TILE
};

}  // namespace

FloatInt4Kernel float_int4_kernel_of(int config, bool half, bool zeros) {
  if (half) return zeros ? kKernels<__half, true>[config] : kKernels<__half, false>[config];
  return zeros ? kKernels<__nv_bfloat16, true>[config] : kKernels<__nv_bfloat16, false>[config];
}

}  // namespace qao::mm::mma_sync::grouped
