// Measured costs of the Hopper kernels: cost_model.inc by operands and tiles.
#pragma once

#include "gemm/problem.h"
#include "gemm/sm90_ws/kernel_traits.h"
#include "qao/cost.h"

namespace qao::gemm::sm90_ws {

// Keys of cost_model.inc, together with the number of tokens. Tall tiles have separate rows.
enum class Operands {
  kFloatInt4,
  kFloatInt4Tall,
  kFloatInt4Four,  // four consumer warpgroups
  kFloatEightBits,
  kFloatEightBitsTall,
  kFloatFolded,
  kInt8Int8,
  kInt8Int8Tall,
  kInt8Int8PingPong,
  kFp8Fp8,
  kFp8Fp8Tall,
  kFp8Fp8Fast,  // accumulate in the tensor cores, without promotion
  kFp8Fp8FastPingPong,
  kFp8Fp8Blocks,
  kInt8Int4,
  kInt8Int4Tall,
  kInt8Int4Symmetric,
  kInt8Int4SymmetricTall,
  kInt8Int4Rows,  // two-level scales: float32 per row, integers per group
  kFp8Int4,
  kFp8Int4Tall,
  kFp8Int4Rows,  // two-level scales: float32 per row, powers of two per group
  kFp8Int4RowsFast,
};
struct Cost {
  Operands operands;
  int tokens;
  const char* name;
  Terms costs;
};
inline constexpr Cost kCosts[] = {
#define QAO_MEMORY(...)
#define QAO_COST(operands, tokens, ...) {Operands::operands, tokens, #operands, {__VA_ARGS__}},
#include "gemm/sm90_ws/cost_model.inc"
#undef QAO_COST
#undef QAO_MEMORY
};
#define QAO_MEMORY(...) inline constexpr Memory kMemory{__VA_ARGS__};
#define QAO_COST(...)
#include "gemm/sm90_ws/cost_model.inc"
#undef QAO_COST
#undef QAO_MEMORY

inline Operands operands_of(const Problem& p, const Traits& traits, Tile tile) {
  using enum Operands;
  const bool tall = tile.tall();
  if (traits.float_x) {
    if (traits.folds) return kFloatFolded;
    if (traits.packed) return tile.warpgroups() == 4 ? kFloatInt4Four : tall ? kFloatInt4Tall : kFloatInt4;
    return tall ? kFloatEightBitsTall : kFloatEightBits;
  }
  if (!traits.packed) {
    if (p.weight_scaling == Scaling::kBlock) return kFp8Fp8Blocks;
    if (p.x == Format::kFp8 && !traits.folds) return tile.ping_pong ? kFp8Fp8FastPingPong : kFp8Fp8Fast;
    if (p.x == Format::kFp8) return tall ? kFp8Fp8Tall : kFp8Fp8;
    return tile.ping_pong ? kInt8Int8PingPong : tall ? kInt8Int8Tall : kInt8Int8;
  }
  if (p.x == Format::kFp8 && traits.folds && !traits.promoted) return tall ? kFp8Int4Tall : kFp8Int4;
  if (p.x == Format::kFp8) return traits.promoted ? kFp8Int4Rows : kFp8Int4RowsFast;
  if (has_row_scales(p)) return kInt8Int4Rows;
  if (p.has_zeros) return tall ? kInt8Int4Tall : kInt8Int4;
  return tall ? kInt8Int4SymmetricTall : kInt8Int4Symmetric;
}

// Null: plan() never selects this tile.
inline const Cost* cost_of(const Problem& problem, Tile tile) {
  const Operands operands = operands_of(problem, traits_of(problem, tile), tile);
  for (const Cost& row : kCosts) {
    if (row.operands == operands && row.tokens == tile.tokens) return &row;
  }
  return nullptr;
}

inline const char* instruction_of(const Problem& problem) {
  return problem.x == Format::kInt8           ? "wgmma s8"
         : problem.x == Format::kFp8          ? "wgmma e4m3"
         : problem.x_dtype == DType::kFloat16 ? "wgmma f16"
                                              : "wgmma bf16";
}

}  // namespace qao::gemm::sm90_ws
