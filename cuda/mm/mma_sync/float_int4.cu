#include <array>

#include "mm/mma_sync/float_int4.cuh"

namespace qao::mm::mma_sync::float_int4 {
namespace {

template <typename T>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, one_wave, ...) static_cast<Kernel>(&mm_kernel<T, Tile<__VA_ARGS__>>),
#include "mm/mma_sync/float_int4_tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_of(int config, bool half) { return half ? kKernels<__half>[config] : kKernels<__nv_bfloat16>[config]; }

}  // namespace qao::mm::mma_sync::float_int4
