// Translation of a problem and its plan to kernel parameters and TMA descriptors.
#pragma once

#include <algorithm>

#include "common/centred.cuh"
#include "common/integers.h"
#include "common/launch.h"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "gemm/launch.h"
#include "gemm/problem.h"
#include "gemm/sm90_ws/dequant_fp4.cuh"
#include "gemm/sm90_ws/kernel_traits.h"
#include "gemm/sm90_ws/params.h"
#include "layout/fp4.h"

namespace qao::gemm::sm90_ws {

constexpr int64_t kPrefetchBytes = 16 * 1024;  // bytes of W per CTA: more delays the first loads of x

inline TileParams tile_params(const Problem& problem, const Plan& plan, const X& x) {
  const Tile tile = kTiles[plan.config];
  const int64_t tile_k = tile_k_of(problem, plan);
  TileParams p{};
  p.m = problem.m;
  p.n = static_cast<int>(problem.n);
  p.k_tiles = static_cast<int>(ceil_div(problem.k, tile_k));
  p.parts = x.parts;
  p.tile_rows = plan.tile_n;
  p.row_blocks = static_cast<int>(ceil_div(problem.n, plan.tile_n));
  p.token_blocks = static_cast<int>(ceil_div(problem.m, plan.tile_m));
  p.split_k = plan.split_k;
  if (tile.ping_pong) p.row_blocks = (p.row_blocks + kPingPongCluster - 1) / kPingPongCluster;
  const int tiles = p.row_blocks * p.token_blocks, ctas = static_cast<int>(plan.ctas);
  p.whole_tiles = plan.splits_last ? tiles / ctas * ctas : tiles;
  // Smaller boxes for the last tokens: zero fill past the last token takes longer than a copy.
  const int sharers = tile.sharers();
  p.last_x_rows = static_cast<int>(round_up(problem.m % plan.tile_m, 8 * sharers)) / sharers;
  const int64_t tile_bytes = plan.tile_n * tile_k / (is_packed(problem.weight) ? 2 : 1);
  p.prefetch_tiles = static_cast<int>(std::min<int64_t>(kPrefetchBytes / tile_bytes, 32));
  return p;
}

// Factor of the sums of a packed W.
inline float sum_factor(const Problem& problem, const Tile& tile, float scale_factor) {
  if (kRows[row_of(problem, tile)].has_row_scales()) {
    return problem.groups() == 1 && problem.x == Format::kInt8 ? 1.0f / kOneGroup : 1.0f;
  }
  if (problem.weight == Format::kFp4) return kFp4Factor;
  if (problem.x == Format::kInt8) return 1.0f / 16;
  if (problem.x == Format::kFp8) return centred::kE4m3Factor;
  return 1 / (problem.x_dtype == DType::kBFloat16 ? Nibble<__nv_bfloat16, false>::kSmall : scale_factor);
}

inline GroupParams group_params(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x) {
  const Tile tile = kTiles[plan.config];
  const bool packed = is_packed(problem.weight), fp4 = problem.weight == Format::kFp4;
  const int64_t tile_k = tile_k_of(problem, plan), size = packed ? problem.group_size : kScaleBlock;
  const int k_tiles = static_cast<int>(ceil_div(problem.k, tile_k));
  GroupParams p{};
  p.factor = 1;
  p.groups = static_cast<int>(packed ? problem.groups() : problem.k_blocks());
  p.scale_rows = fp4 ? static_cast<int>(fp4::scale_rows(problem.k, problem.group_size)) : p.groups;
  p.groups_per_tile = (p.groups > 1 || fp4) && size < tile_k ? static_cast<int>(tile_k / size) : 1;
  if (packed || has_blocks(problem)) {
    while (p.fold_shift < 30 && (tile_k << p.fold_shift) < size) ++p.fold_shift;
    if (p.groups == 1) p.fold_shift = 30;
  }
  if (packed) {
    p.group_bytes = group_bytes(problem);
    p.has_zeros = problem.has_zeros;
    p.subtracts_zeros = problem.x != Format::kFloat && problem.has_zeros;
    p.scales = arguments.scales;
    p.scale_dtype = problem.scale_dtype;
    p.scale_factor = problem.x_dtype == DType::kFloat16 && problem.scale_dtype != DType::kFloat16 ? 64.0f : 1.0f;
    p.factor = sum_factor(problem, tile, p.scale_factor);
    // A symmetric W with float32 x has no sums; a copy of zero bytes still needs a valid address.
    p.columns = x.sums != nullptr ? x.sums : static_cast<const float*>(arguments.scales);
    p.column_tiles = traits_of(problem, tile).columns && x.sums != nullptr ? k_tiles : 0;
  } else if (has_blocks(problem)) {
    p.block_scales = static_cast<const float*>(arguments.scales);
    p.columns = arguments.x_scales;
    p.column_tiles = k_tiles;
  }
  return p;
}

inline EpilogueParams epilogue_params(const Problem& problem, const Plan& plan, const Arguments& arguments) {
  const Tile tile = kTiles[plan.config];
  const float* scales = static_cast<const float*>(arguments.scales);
  EpilogueParams p{};
  if (is_packed(problem.weight)) {
    if (problem.weight == Format::kFp4 && problem.group_size == fp4::kNvGroup) p.row_scales = scales;
    if (kRows[row_of(problem, tile)].has_row_scales()) {
      const bool one = problem.groups() == 1;
      p.row_scales = one ? scales : arguments.row_scales;
      p.row_scale_dtype = one ? problem.scale_dtype : DType::kFloat32;
    }
  } else if (!has_blocks(problem)) {
    p.row_scales = scales;
    p.row_scale_stride = problem.weight_scaling == Scaling::kRow ? 1 : 0;
  }
  if (problem.x != Format::kFloat && problem.x_scaling != Scaling::kBlock) {
    p.x_scales = arguments.x_scales;
    p.x_scale_stride = problem.x_scaling == Scaling::kRow ? 1 : 0;
  }
  if (problem.x_zeros) p.x_zeros = arguments.x_zeros, p.weight_sums = arguments.weight_sums;
  p.bias = arguments.bias;
  p.y = arguments.y;
  p.slices = std::max(plan.partials, 1);
  if (plan.partials > 0) {
    void* workspace = static_cast<uint8_t*>(arguments.workspace) + workspace_of(problem, plan.partials).partials;
    p.partials = static_cast<float*>(workspace);
  }
  p.bias_dtype = problem.bias_dtype;
  p.y_dtype = problem.y_dtype;
  const bool aligned = problem.n % 8 == 0 && reinterpret_cast<uintptr_t>(p.y) % 16 == 0;
  p.copies_y = tile.ping_pong && size_of(p.y_dtype) == 2 && aligned;
  return p;
}

// Parameters of a dense GEMM. With several experts, W, scales and bias are those of expert 0.
inline Params params_of(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x) {
  return {tile_params(problem, plan, x), group_params(problem, plan, arguments, x),
          epilogue_params(problem, plan, arguments)};
}

// W and its scales. `rows`: rows of W of one expert, `experts`: number of contiguous weights.
inline Status make_weight_maps(const Problem& problem, const Plan& plan, const Params& p, const void* data,
                               const void* scale_data, int64_t rows, int64_t experts, CUtensorMap* weight_map,
                               CUtensorMap* scales_map) {
  using Size = cuuint64_t;
  const Size k = problem.k, row_tiles = int4::tiles_n(rows) * experts, tiles_k = int4::tiles_k(problem.k);
  const cuuint32_t tile_k = static_cast<cuuint32_t>(tile_k_of(problem, plan)), tile_rows = p.tile_rows,
                   box_tiles = tile_rows / int4::kTileN;
  if (!is_packed(problem.weight)) {
    const TensorShape weight{{k, 1, static_cast<Size>(rows * experts)}, {k, k}, {tile_k, 1, tile_rows}};
    return encode_tensor_map(weight_map, data, CU_TENSOR_MAP_DATA_TYPE_UINT8, weight,
                             tile_k == 64 ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
  }
  const TensorShape weight{{int4::kTileBytes / 4, tiles_k, row_tiles},
                           {int4::kTileBytes, tiles_k * int4::kTileBytes},
                           {int4::kTileBytes / 4, tile_k / int4::kTileK, box_tiles}};
  const Size group_bytes = p.group_bytes, groups = p.groups;
  const TensorShape scales{
      {group_bytes / 2, groups, row_tiles},
      {group_bytes, static_cast<Size>(p.scale_rows) * group_bytes},
      {static_cast<cuuint32_t>(group_bytes / 2), static_cast<cuuint32_t>(p.groups_per_tile), box_tiles}};
  Status status =
      encode_tensor_map(weight_map, data, CU_TENSOR_MAP_DATA_TYPE_UINT32, weight, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!status.ok()) return status;
  return encode_tensor_map(scales_map, scale_data, CU_TENSOR_MAP_DATA_TYPE_UINT16, scales, CU_TENSOR_MAP_SWIZZLE_NONE);
}

// x, which has Params::m rows, and a y that is stored by TMA.
inline Status make_token_maps(const Problem& problem, const Plan& plan, const X& x, const Params& p, TensorMaps* maps) {
  using Size = cuuint64_t;
  const bool packed = is_packed(problem.weight), float_x = problem.x == Format::kFloat;
  const bool half = problem.x_dtype == DType::kFloat16;
  const Size m = p.m, n = problem.n, k = problem.k, tiles_k = int4::tiles_k(problem.k), bytes = float_x ? 2 : 1;
  const cuuint32_t atom_k = 128 / static_cast<cuuint32_t>(bytes);
  TensorShape x_shape{{packed && !float_x ? tiles_k * int4::kTileK : k, static_cast<Size>(x.parts), m},
                      {(x.parts > 1 ? x.part_stride : x.stride) * bytes, x.stride * bytes},
                      {atom_k, 1, 0}};
  const CUtensorMapDataType x_dtype = !float_x ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                      : half   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  Status status;
  const auto encode_x = [&](int rows, CUtensorMap* map) {
    x_shape.box[2] = static_cast<cuuint32_t>(rows);
    status = encode_tensor_map(map, x.data, x_dtype, x_shape, CU_TENSOR_MAP_SWIZZLE_128B);
    return status.ok();
  };
  if (p.m >= plan.tile_m && !encode_x(plan.tile_m / kTiles[plan.config].sharers(), &maps->x)) return status;
  if (p.last_x_rows > 0 && !encode_x(p.last_x_rows, &maps->last_x)) return status;
  if (p.copies_y) {
    const TensorShape y{{n, 1, m}, {n * 2, n * 2}, {kWarpgroupRows, 1, kChunkTokens}};
    status = encode_tensor_map(&maps->y, p.y, CU_TENSOR_MAP_DATA_TYPE_UINT16, y, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  return status;
}

// Launches a kernel of a plan with its shared memory, in clusters of `cluster` CTAs.
template <typename Params, typename Maps>
Status launch_planned(const char* doing, void (*kernel)(Params, Maps), const Plan& plan, int cluster, void* stream,
                      const Params& p, const Maps& maps) {
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  Launch launch{static_cast<unsigned>(plan.ctas), static_cast<unsigned>(plan.warps) * 32,
                static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = static_cast<size_t>(plan.shared_bytes);
  launch.cluster = cluster;
  launch.overlapped = true;
  return launch_kernel(launch, doing, kernel, p, maps);
}

// `experts`: number of contiguous weights.
inline Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                               const Params& p, int64_t experts, TensorMaps* maps) {
  if (Status status = make_token_maps(problem, plan, x, p, maps); !status.ok()) return status;
  return make_weight_maps(problem, plan, p, arguments.weight, arguments.scales, problem.n, experts, &maps->weight,
                          &maps->scales);
}

}  // namespace qao::gemm::sm90_ws
