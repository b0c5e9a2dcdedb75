#include "common/check.h"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "int4_mm/sm90.cuh"

namespace qao::int4_mm::sm90 {
namespace {

using KernelFunction = void (*)(Params, TensorMaps);

template <int tokens>
KernelFunction kernel_of(DType x_dtype) {
  if (x_dtype == DType::kFloat16) return &int4_mm_kernel<Kernel<__half, false, tokens>>;
  if (x_dtype == DType::kBFloat16) return &int4_mm_kernel<Kernel<__nv_bfloat16, false, tokens>>;
  if constexpr (serves(tokens, true)) return &int4_mm_kernel<Kernel<__nv_bfloat16, true, tokens>>;
  return nullptr;
}
// Of row `config` of configs.inc.
KernelFunction kernel_of(DType x_dtype, int config) {
  int row = 0;
#define QAO_SM80(...)
#define QAO_SM90(tokens) \
  if (config == row++) return kernel_of<tokens>(x_dtype);
#include "int4_mm/configs.inc"
#undef QAO_SM90
#undef QAO_SM80
  return nullptr;
}

Status make_tensor_maps(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x,
                        const Params& p, TensorMaps* maps) {
  using Size = cuuint64_t;
  const Size m = problem.m, k = problem.k, row_tiles = tiles_n(problem.n), k_tiles = p.k_tiles, groups = p.groups,
             group_bytes = p.group_bytes;
  const cuuint32_t box_tiles = kRows / kTileN, tokens = plan.tile_m / p.share;
  const TensorShape x_shape{{k, static_cast<Size>(x.parts), m},
                            {static_cast<Size>(x.parts > 1 ? x.part_stride : x.stride) * 2, x.stride * Size{2}},
                            {kTileK, 1, tokens}};
  const TensorShape weight{
      {kTileBytes / 4, k_tiles, row_tiles}, {kTileBytes, k_tiles * kTileBytes}, {kTileBytes / 4, 1, box_tiles}};
  const TensorShape scales{
      {group_bytes / 2, groups, row_tiles},
      {group_bytes, groups * group_bytes},
      {static_cast<cuuint32_t>(group_bytes / 2), static_cast<cuuint32_t>(p.groups_per_tile), box_tiles}};
  const bool half = problem.x_dtype == DType::kFloat16;
  Status status =
      encode_tensor_map(&maps->x, x.data, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                        x_shape, CU_TENSOR_MAP_SWIZZLE_128B);
  if (!status.ok()) return status;
  status = encode_tensor_map(&maps->weight, arguments.weight, CU_TENSOR_MAP_DATA_TYPE_UINT32, weight,
                             CU_TENSOR_MAP_SWIZZLE_NONE);
  if (!status.ok()) return status;
  return encode_tensor_map(&maps->scales, arguments.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, scales,
                           CU_TENSOR_MAP_SWIZZLE_NONE);
}

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, const X& x, void* stream) {
  Params p{};
  p.m = problem.m;
  p.n = static_cast<int>(problem.n);
  p.k_tiles = static_cast<int>(tiles_k(problem.k));
  p.parts = x.parts;
  p.row_blocks = static_cast<int>((problem.n + kRows - 1) / kRows);
  p.token_blocks = static_cast<int>((problem.m + plan.tile_m - 1) / plan.tile_m);
  p.split_k = plan.split_k;
  p.share = plan.tile_n / kRows;
  p.groups = static_cast<int>(problem.groups());
  p.groups_per_tile = p.groups > 1 && problem.group_size < kTileK ? static_cast<int>(kTileK / problem.group_size) : 1;
  while (p.group_shift < 30 && (int64_t{kTileK} << p.group_shift) < problem.group_size) ++p.group_shift;
  if (p.groups == 1) p.group_shift = 30;
  p.group_bytes = (problem.has_zeros ? 2 : 1) * kTileN * size_of(problem.scale_dtype);
  p.has_zeros = problem.has_zeros;
  p.scale_dtype = problem.scale_dtype;
  // Products of a float16 scale and a small whole number are exact where they are subnormal; other scales are not.
  p.scale_factor = problem.x_dtype == DType::kFloat16 && problem.scale_dtype != DType::kFloat16 ? 64.0f : 1.0f;
  p.factor = 1 / p.scale_factor;
  // Without sums a copy of nothing still wants an address.
  p.x_sums = x.sums != nullptr ? x.sums : static_cast<const float*>(arguments.scales);
  p.sum_tiles = x.sums != nullptr ? p.k_tiles : 0;
  p.bias = arguments.bias;
  p.y = arguments.y;
  p.bias_dtype = problem.bias_dtype;
  p.y_dtype = problem.x_dtype;

  TensorMaps maps{};
  if (Status status = make_tensor_maps(problem, plan, arguments, x, p, &maps); !status.ok()) return status;
  const KernelFunction kernel = kernel_of(problem.x_dtype, plan.config);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {static_cast<unsigned>(std::max(p.split_k, p.share)), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = static_cast<unsigned>(plan.ctas);
  config.blockDim = kConsumerThreads + kProducerThreads;
  config.dynamicSmemBytes = static_cast<size_t>(plan.shared_bytes);
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &cluster;
  config.numAttrs = std::max(p.split_k, p.share) > 1 ? 1 : 0;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, p, maps), "launching int4_mm_kernel");
}

}  // namespace qao::int4_mm::sm90
