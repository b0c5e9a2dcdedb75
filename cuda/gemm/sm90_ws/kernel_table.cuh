// Table of kernel instantiations: every row of formats.inc with every tile of tiles.inc.
#pragma once

#include <array>
#include <tuple>
#include <utility>

#include "gemm/sm90_ws/grouped.h"
#include "gemm/sm90_ws/kernel.cuh"

namespace qao::gemm::sm90_ws {

template <bool grouped>
using KernelFunction = void (*)(std::conditional_t<grouped, GroupedParams, Params>, TensorMaps);

// Null if the row has no kernel for this tile.
template <bool grouped, int row, typename T, int rows, int tokens, bool ping_pong>
constexpr KernelFunction<grouped> one() {
  constexpr Formats kOf = kRows[row];
  constexpr Tile kTile{rows, tokens, ping_pong};
  if constexpr (kOf.is_for(kTile) && kOf.traits().serves(kTile) && (!grouped || serves_experts(kTile))) {
    return &sm90_ws<Kernel<T, kOf.weight, kOf.fold, kOf.columns, rows, tokens, ping_pong, grouped>>;
  } else {
    return nullptr;
  }
}

// One tile, all rows of formats.inc.
template <bool grouped, int rows, int tokens, bool ping_pong, size_t... row>
constexpr std::array<KernelFunction<grouped>, kRowCount> of_tile(std::index_sequence<row...>) {
  using qao::wgmma::E4m3, qao::wgmma::E5m2;
  using Types = std::tuple<
#define QAO_FORMATS(x, type, ...) type,
#include "gemm/sm90_ws/formats.inc"
#undef QAO_FORMATS
      void>;
  return {one<grouped, row, std::tuple_element_t<row, Types>, rows, tokens, ping_pong>()...};
}
template <bool grouped>
constexpr std::array<KernelFunction<grouped>, kRowCount> kKernels[] = {
#define QAO_TILE(rows, tokens, ping_pong) \
  of_tile<grouped, rows, tokens, ping_pong>(std::make_index_sequence<kRowCount>{}),
#include "gemm/sm90_ws/tiles.inc"
#undef QAO_TILE
};

}  // namespace qao::gemm::sm90_ws
