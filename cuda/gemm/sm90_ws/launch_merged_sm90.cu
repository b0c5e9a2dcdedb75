// Launch and instantiations of sm90_ws_merged: several int4 weights, one x.
#include <climits>

#include "gemm/launch.h"
#include "gemm/sm90_ws/kernel.cuh"
#include "gemm/sm90_ws/make_params.h"

namespace qao::gemm::sm90_ws {
namespace {

using MergedFunction = void (*)(MergedParams, MergedTensorMaps);

// Null if plan_merged() never selects this tile.
template <bool gated, int rows, int tokens, bool ping_pong>
constexpr MergedFunction of_tile() {
  if constexpr (merges_in(Tile{rows, tokens, ping_pong}, gated)) {
    using Dense = Kernel<__nv_bfloat16, Format::kInt4, Fold::kNone, false, rows, tokens, ping_pong>;
    return &sm90_ws_merged<MergedKernel<Dense, gated>>;
  } else {
    return nullptr;
  }
}
template <bool gated>
constexpr MergedFunction kMergedKernels[] = {
#define QAO_TILE(...) of_tile<gated, __VA_ARGS__>(),
#include "gemm/sm90_ws/tiles.inc"
#undef QAO_TILE
};

}  // namespace

Status launch_merged(const Problem& problem, const Plan& plan, const Arguments& arguments, std::span<const Part> parts,
                     const X& x, void* stream) {
  MergedParams p{params_of(problem, plan, arguments, x), {}};
  MergedTensorMaps maps{};
  if (Status status = make_token_maps(problem, plan, x, p, &maps); !status.ok()) return status;
  Params of_box = p;
  if (problem.gated) of_box.tile_rows /= 2;
  p.row_blocks = 0;
  for (size_t i = 0; i < kMaxParts; ++i) {
    p.of[i].first_block = i < parts.size() ? p.row_blocks : INT_MAX;
    if (i >= parts.size()) continue;
    const Part& part = parts[i];
    p.of[i].n = static_cast<int>(part.n), p.of[i].bias = part.bias, p.of[i].y = part.y;
    if (part.bias != nullptr) p.bias = part.bias;  // set if any weight has one
    if (!problem.gated || i == 0) p.row_blocks += static_cast<int>(ceil_div(part.n, of_box.tile_rows));
    if (Status status = make_weight_maps(problem, plan, of_box, part.weight, part.scales, part.n, 1, &maps.of[i].weight,
                                         &maps.of[i].scales);
        !status.ok()) {
      return status;
    }
  }
  p.whole_tiles = p.row_blocks * p.token_blocks;
  const MergedFunction kernel = problem.gated ? kMergedKernels<true>[plan.config] : kMergedKernels<false>[plan.config];
  return launch_planned("launching sm90_ws_merged", kernel, plan, p.split_k, stream, p, maps);
}

}  // namespace qao::gemm::sm90_ws
