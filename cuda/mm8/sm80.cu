#include <array>

#include "mm8/sm80.cuh"

namespace qao::mm8 {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_SM80(max_m, share, x, weight, ...) sm80::kernel_for<x, weight, X, W, Tile<__VA_ARGS__>>(),
#define QAO_SM90(...)
#include "mm8/configs.inc"
#undef QAO_SM90
#undef QAO_SM80
};

}  // namespace

Kernel sm80_kernel(int config, Operands operands) {
  switch (operands) {
    case Operands::kInt8Int8:
      return kKernels<Int8, Int8>[config];
    case Operands::kInt8Int4:
      return kKernels<Int8, Int4>[config];
    case Operands::kFp8Fp8:
      return kKernels<Fp8, Fp8>[config];
    case Operands::kFp8Int4:
      return kKernels<Fp8, Int4>[config];
    case Operands::kBFloat16Int8:
      return kKernels<__nv_bfloat16, Int8>[config];
    case Operands::kBFloat16Fp8:
      return kKernels<__nv_bfloat16, Fp8>[config];
    case Operands::kFloat16Int8:
      return kKernels<__half, Int8>[config];
    case Operands::kFloat16Fp8:
      return kKernels<__half, Fp8>[config];
  }
  return nullptr;
}

}  // namespace qao::mm8
