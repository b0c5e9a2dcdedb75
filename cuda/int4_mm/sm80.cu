#include <array>

#include "int4_mm/sm80.cuh"

namespace qao::int4_mm {
namespace {

template <typename T, bool zeros>
constexpr std::array kKernels = {
#define QAO_SM80(max_m, one_wave, ...) static_cast<Sm80Kernel>(&sm80::int4_mm_kernel<T, Tile<__VA_ARGS__>, zeros>),
#include "int4_mm/configs.inc"
#undef QAO_SM80
};

}  // namespace

Sm80Kernel sm80_kernel(int config, bool half, bool zeros) {
  if (half) return zeros ? kKernels<__half, true>[config] : kKernels<__half, false>[config];
  return zeros ? kKernels<__nv_bfloat16, true>[config] : kKernels<__nv_bfloat16, false>[config];
}

}  // namespace qao::int4_mm
