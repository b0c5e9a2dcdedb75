// What x and W are made of: the kernels that a row of tiles.inc is compiled for.
#pragma once

#include "mm/problem.h"

namespace qao::mm::mma_sync {

enum class Operands : int {
#define QAO_OPERANDS(name, ...) name,
#include "mm/mma_sync/operands.inc"
#undef QAO_OPERANDS
  kCount,
};

inline Operands operands_of(const Problem& problem) {
  const bool int8 = problem.weight == Format::kInt8;
  if (problem.x == Format::kInt8) return int8 ? Operands::kInt8Int8 : Operands::kInt8Int4;
  if (problem.x == Format::kFp8) return problem.weight == Format::kFp8 ? Operands::kFp8Fp8 : Operands::kFp8Int4;
  if (problem.x_dtype == DType::kFloat16) return int8 ? Operands::kFloat16Int8 : Operands::kFloat16Fp8;
  return int8 ? Operands::kBFloat16Int8 : Operands::kBFloat16Fp8;
}

}  // namespace qao::mm::mma_sync
