// The portable body on fp8 tensor cores: compiled for sm_89, and as PTX for what is newer.
#include <array>

#include "mm8/sm80.cuh"

namespace qao::mm8 {
namespace {

template <typename W>
constexpr std::array kKernels = {
#define QAO_SM80(max_m, share, x, weight, ...) sm80::kernel_for<x, weight, Fp8Mma, W, Tile<__VA_ARGS__>>(),
#define QAO_SM90(...)
#include "mm8/configs.inc"
#undef QAO_SM90
#undef QAO_SM80
};

}  // namespace

Kernel sm89_kernel(int config, Operands operands) {
  return operands == Operands::kFp8Fp8 ? kKernels<Fp8>[config] : kKernels<Int4>[config];
}

}  // namespace qao::mm8
