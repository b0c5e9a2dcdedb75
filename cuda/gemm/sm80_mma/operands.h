// Pairs of x and W formats that a row of tiles.inc is compiled for.
#pragma once

#include <array>

#include "gemm/problem.h"

namespace qao::gemm::sm80_mma {

enum class Operands : int {
#define QAO_OPERANDS(name, ...) name,
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
  kCount,  // also means: no kernels
};

// Indexed by the formats of x and W, and by whether x is float16.
constexpr auto kOperandsOfFormats = [] {
  std::array<std::array<std::array<Operands, 2>, kFormatCount>, kFormatCount> of{};
  for (auto& of_x : of) {
    for (auto& of_weight : of_x) of_weight = {Operands::kCount, Operands::kCount};
  }
#define QAO_OPERANDS(name, x_type, weight_type, bytes, x, weight, dtype) \
  of[static_cast<int>(Format::x)][static_cast<int>(Format::weight)][DType::dtype == DType::kFloat16] = Operands::name;
#include "gemm/sm80_mma/operands.inc"
#undef QAO_OPERANDS
  return of;
}();

inline Operands operands_of(const Problem& problem) {
  const bool float16 = problem.x == Format::kFloat && problem.x_dtype == DType::kFloat16;
  return kOperandsOfFormats[static_cast<int>(problem.x)][static_cast<int>(problem.weight)][float16];
}

}  // namespace qao::gemm::sm80_mma
