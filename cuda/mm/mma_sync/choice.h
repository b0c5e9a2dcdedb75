// Which row of tiles_sm90.inc or tiles.inc runs a problem, and how its work is split over CTAs. Pure host code.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "mm/mma_sync/operands.h"
#include "mm/mma_sync/tile.h"
#include "mm/problem.h"

namespace qao::mm::mma_sync {

// A row of tiles_sm90.inc or tiles.inc.
struct Config {
  int index;  // its row; those of tiles.inc come after
  int64_t max_m;
  ShareKind share;
  XKind x;
  WeightKind weight;
  bool scales_x;
  int tile_n, tile_m, warps_k, warps, stages, ctas_per_sm, token_sum_bytes;
  std::array<int, static_cast<size_t>(Operands::kCount)> ring;  // bytes of it, by the operands

  int ring_bytes(const Problem& problem) const { return ring[static_cast<size_t>(operands_of(problem))]; }
};

struct Choice {
  const Config* config = nullptr;
  int64_t ctas = 0;  // of one part of K
  bool runs = false;
  int64_t shared_bytes = 0;
  int sums_at = 0, sum_places = 1;
  int split_k = 1;
};

// The row for the problem on this GPU. `config` is null where none fits: then the product cannot quantise
// x, or the GPU has too little shared memory.
Choice choose(const Problem& problem, const Gpu& gpu, bool quantizes);

}  // namespace qao::mm::mma_sync
