// Tiles and workspace layout of grouped GEMMs on Hopper.
#pragma once

#include "gemm/problem.h"
#include "gemm/sm90_ws/kernel_traits.h"
#include "qao/grouped_gemm.h"

namespace qao::gemm::sm90_ws {

constexpr bool serves_experts(Tile tile) { return !tile.tall() && !tile.between(); }

// TMA reads contiguous rows. Rows that are not contiguous or not aligned are gathered first.
inline bool gathers(const Problem& problem, const Experts& experts) {
  return problem.m > 0 &&
         (experts.row_index != nullptr || !(problem.x_aligned || problem.quantizes_x || is_split(problem)));
}

// Workspace offsets of gathered rows of x and their parameters, after the buffers of workspace_of().
struct Gathered {
  int64_t x_bytes = 0;  // bytes per row
  int64_t x = -1, sums = -1, scales = -1, zeros = -1;
  int64_t sums_width = 0, scales_width = 0;  // elements per row
  int64_t bytes = 0;                         // total workspace

  Gathered(const Problem& problem, int64_t rows) : bytes(workspace_of(problem, 0).bytes) {
    const bool packed = is_packed(problem.weight), float_x = problem.x == Format::kFloat;
    const int64_t columns = packed && !float_x ? int4::tiles_k(problem.k) * int4::kTileK : problem.k;
    x_bytes = is_split(problem) ? kFloat32Parts * workspace_of(problem, 0).part_stride * 2
                                : round_up(columns * (float_x ? 2 : 1), 16);
    if (packed) sums_width = problem.groups();
    if (problem.x_scaling == Scaling::kBlock) scales_width = problem.k_blocks();
    if (problem.x_scaling == Scaling::kRow) scales_width = 1;
    x = take(rows * x_bytes);
    sums = take(rows * sums_width * 4);
    scales = take(rows * scales_width * 4);
    zeros = take(rows * 4);
  }

 private:
  int64_t take(int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(size, 256);
    return at;
  }
};

}  // namespace qao::gemm::sm90_ws
