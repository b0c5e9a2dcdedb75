#include "common/check.h"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "mm8/sm90.cuh"
#include "mm8/workspace.h"

namespace qao::mm8::sm90 {
namespace {

using KernelFunction = void (*)(Params, TensorMaps);

template <typename T, Format weight, Fold fold, bool columns, int tokens, int share>
KernelFunction one() {
  if constexpr (fits(tokens, fold != Fold::kNone, weight == Format::kInt4 || sizeof(T) == 2)) {
    return &mm8_kernel<Kernel<T, weight, fold, columns, tokens, share>>;
  } else {
    return nullptr;
  }
}

template <typename T, Fold fold, int tokens, int share>
KernelFunction of_float(const Problem& p) {
  if (p.weight == Format::kInt8) return one<T, Format::kInt8, fold, false, tokens, share>();
  if (p.weight_scaling == Scaling::kBlock) return one<T, Format::kFp8, Fold::kBlock, false, tokens, share>();
  return one<T, Format::kFp8, fold, false, tokens, share>();
}
template <int tokens, int share>
KernelFunction kernel_of(const Problem& p) {
  using wgmma::E4m3;
  if (p.x == Format::kFloat) {
    if (p.x_dtype == DType::kFloat16) return of_float<__half, Fold::kNone, tokens, share>(p);
    return is_split(p) ? of_float<__nv_bfloat16, Fold::kPromote, tokens, share>(p)
                       : of_float<__nv_bfloat16, Fold::kNone, tokens, share>(p);
  }
  if (p.x == Format::kInt8) {
    if (p.weight == Format::kInt8) return one<int8_t, Format::kInt8, Fold::kNone, false, tokens, share>();
    if (p.has_zeros) return one<int8_t, Format::kInt4, Fold::kGroup, true, tokens, share>();
    return one<int8_t, Format::kInt4, Fold::kGroup, false, tokens, share>();
  }
  if (p.weight == Format::kInt4) return one<E4m3, Format::kInt4, Fold::kGroup, true, tokens, share>();
  if (p.weight_scaling == Scaling::kBlock) return one<E4m3, Format::kFp8, Fold::kBlock, true, tokens, share>();
  if (p.fast_accum) return one<E4m3, Format::kFp8, Fold::kNone, false, tokens, share>();
  return one<E4m3, Format::kFp8, Fold::kPromote, false, tokens, share>();
}
// Of row `config` of configs.inc.
KernelFunction kernel_of(const Problem& p, int config) {
  int row = 0;
#define QAO_SM80(...)
#define QAO_SM90(tokens, share) \
  if (config == row++) return kernel_of<tokens, share>(p);
#include "mm8/configs.inc"
#undef QAO_SM90
#undef QAO_SM80
  return nullptr;
}

Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, int share,
                        const Params& p, TensorMaps* maps) {
  using Size = cuuint64_t;
  const bool packed = problem.weight == Format::kInt4, float_x = problem.x == Format::kFloat;
  const bool half = problem.x_dtype == DType::kFloat16;
  const Size m = problem.m, n = problem.n, k = problem.k, row_tiles = int4_mm::tiles_n(problem.n),
             tiles_k = int4_mm::tiles_k(problem.k), bytes = float_x ? 2 : 1;
  const cuuint32_t tile_k = 128 / static_cast<cuuint32_t>(bytes), tokens = plan.tile_m / share,
                   box_tiles = kTileN / int4_mm::kTileN;
  const TensorShape x_shape{{packed ? tiles_k * int4_mm::kTileK : k, static_cast<Size>(x.parts), m},
                            {(x.parts > 1 ? x.part_stride : x.stride) * bytes, x.stride * bytes},
                            {tile_k, 1, tokens}};
  const CUtensorMapDataType x_dtype = !float_x ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                      : half   ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                               : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  Status status = encode_tensor_map(&maps->x, x.data, x_dtype, x_shape, CU_TENSOR_MAP_SWIZZLE_128B);
  if (!status.ok()) return status;
  if (!packed) {
    const TensorShape weight{{k, 1, n}, {k, k}, {tile_k, 1, kTileN}};
    return encode_tensor_map(&maps->weight, arguments.weight, CU_TENSOR_MAP_DATA_TYPE_UINT8, weight,
                             float_x ? CU_TENSOR_MAP_SWIZZLE_64B : CU_TENSOR_MAP_SWIZZLE_128B);
  }
  const TensorShape weight{{int4_mm::kTileBytes / 4, tiles_k, row_tiles},
                           {int4_mm::kTileBytes, tiles_k * int4_mm::kTileBytes},
                           {int4_mm::kTileBytes / 4, 2, box_tiles}};
  const Size group_bytes = p.group_bytes, groups = p.groups;
  const TensorShape scales{
      {group_bytes / 2, groups, row_tiles},
      {group_bytes, groups * group_bytes},
      {static_cast<cuuint32_t>(group_bytes / 2), static_cast<cuuint32_t>(p.groups_per_tile), box_tiles}};
  status = encode_tensor_map(&maps->weight, arguments.weight, CU_TENSOR_MAP_DATA_TYPE_UINT32, weight,
                             CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!status.ok()) return status;
  return encode_tensor_map(&maps->scales, arguments.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, scales,
                           CU_TENSOR_MAP_SWIZZLE_NONE);
}

// Groups along K: how many in a K-tile, or how many K-tiles in one.
void set_groups(const Problem& problem, Params* p) {
  p->groups = static_cast<int>(problem.weight == Format::kInt4 ? problem.groups() : problem.k_blocks());
  const int64_t tile_k = problem.x == Format::kFloat ? 64 : 128;
  const int64_t size = problem.weight == Format::kInt4 ? problem.group_size : kScaleBlock;
  p->groups_per_tile = p->groups > 1 && size < tile_k ? static_cast<int>(tile_k / size) : 1;
  p->fold_shift = 0;
  if (problem.weight == Format::kInt4 || problem.weight_scaling == Scaling::kBlock) {
    while (p->fold_shift < 30 && (tile_k << p->fold_shift) < size) ++p->fold_shift;
    if (p->groups == 1) p->fold_shift = 30;
  }
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  const bool packed = problem.weight == Format::kInt4, block = problem.weight_scaling == Scaling::kBlock && !packed;
  const int64_t tile_k = problem.x == Format::kFloat ? 64 : 128;
  Params p{};
  p.m = problem.m;
  p.n = static_cast<int>(problem.n);
  p.k_tiles = static_cast<int>((problem.k + tile_k - 1) / tile_k);
  p.parts = x.parts;
  p.row_blocks = static_cast<int>((problem.n + kTileN - 1) / kTileN);
  p.token_blocks = static_cast<int>((problem.m + plan.tile_m - 1) / plan.tile_m);
  p.split_k = plan.split_k;
  set_groups(problem, &p);
  p.factor = 1;
  if (packed) {
    p.group_bytes = (problem.has_zeros ? 2 : 1) * int4_mm::kTileN * size_of(problem.scale_dtype);
    p.has_zeros = problem.has_zeros;
    p.scale_dtype = problem.scale_dtype;
    p.columns = arguments.x_sums;
    p.factor = problem.x == Format::kInt8 ? 1.0f / 16 : 512.0f;
  } else if (block) {
    p.block_scales = static_cast<const float*>(arguments.scales);
    p.columns = arguments.x_scales;
  } else {
    p.row_scales = static_cast<const float*>(arguments.scales);
    p.row_scale_stride = problem.weight_scaling == Scaling::kRow ? 1 : 0;
  }
  if (problem.x != Format::kFloat && problem.x_scaling != Scaling::kBlock) {
    p.x_scales = arguments.x_scales;
    p.x_scale_stride = problem.x_scaling == Scaling::kRow ? 1 : 0;
  }
  if (problem.x_zeros) p.x_zeros = arguments.x_zeros, p.weight_sums = arguments.weight_sums;
  p.bias = arguments.bias;
  p.y = arguments.y;
  p.bias_dtype = problem.bias_dtype;
  p.y_dtype = problem.y_dtype;

  const int share = plan.tile_n / kTileN;
  TensorMaps maps{};
  if (Status status = make_tensor_maps(problem, plan, arguments, x, share, p, &maps); !status.ok()) return status;
  const KernelFunction kernel = kernel_of(problem, plan.config);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(std::max(plan.split_k, share)), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(plan.ctas);
  config.blockDim = kConsumerThreads + kProducerThreads;
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = std::max(plan.split_k, share) > 1 ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, maps), "launching mm8_kernel");
}

}  // namespace qao::mm8::sm90
