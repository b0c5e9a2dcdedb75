// Choice of a row of tiles_sm90.inc or tiles.inc for a problem, and of its partition over CTAs.
// This is host code only.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "gemm/problem.h"
#include "gemm/sm80_mma/operands.h"
#include "gemm/sm80_mma/tile.h"

namespace qao::gemm::sm80_mma {

// A row of tiles_sm90.inc or tiles.inc.
struct Config {
  int index;  // its row; rows of tiles.inc follow those of tiles_sm90.inc
  int64_t max_m;
  ShareKind share;
  XKind x;
  WeightKind weight;
  bool scales_x;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm, token_sum_bytes;
  std::array<int, static_cast<size_t>(Operands::kCount)> ring;  // ring bytes, by operand formats

  int ring_bytes(const Problem& problem) const { return ring[static_cast<size_t>(operands_of(problem))]; }
};

struct Choice {
  const Config* config = nullptr;
  int64_t ctas = 0;  // per split of K
  bool runs = false;
  int64_t shared_bytes = 0;
  int sums_at = 0, sum_places = 1;
  int split_k = 1;
};

// Chooses the row for this problem and GPU. `config` is null if no row fits: the quantization of x cannot be fused, or
// the GPU has too little shared memory.
Choice choose(const Problem& problem, const Gpu& gpu, bool quantizes);

}  // namespace qao::gemm::sm80_mma
