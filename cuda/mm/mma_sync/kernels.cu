#include <array>

#include "mm/mma_sync/warp.cuh"

namespace qao::mm::mma_sync {
namespace {

template <typename X, typename W>
constexpr std::array kKernels = {
#define QAO_TILE(max_m, share, x, weight, ...) kernel_for<x, weight, X, W, Tile<__VA_ARGS__>>(),
#include "mm/mma_sync/tiles.inc"
#undef QAO_TILE
};

}  // namespace

Kernel kernel_of(int config, Operands operands) {
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

}  // namespace qao::mm::mma_sync
