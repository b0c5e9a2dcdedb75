// Carries out a plan: at most three kernels on one stream. split float32 x -> product -> finish (split-K, zero points).
#include <algorithm>
#include <string_view>

#include "common/check.h"
#include "common/float32.cuh"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "int4_mm/kernels.h"
#include "int4_mm/layout.h"
#include "int4_mm/split_k.cuh"
#include "int4_mm/workspace.h"

namespace qao::int4_mm {
namespace {

int group_shift(int64_t group_size, int64_t k) {
  if (group_size == 32 && k > 32) return -1;
  int shift = 0;
  while (shift < 30 && (int64_t{kTileK} << shift) < std::min(group_size, k)) ++shift;
  return group_size >= k ? 30 : shift;
}

template <typename Kernel, typename... Arguments>
Status launch_product(Kernel kernel, const Plan& plan, cudaStream_t stream, const Arguments&... arguments) {
  const int shared_bytes = static_cast<int>(plan.shared_bytes);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  const dim3 grid(static_cast<unsigned>(plan.ctas / plan.split_k), plan.split_k);
  kernel<<<grid, plan.warps * 32, shared_bytes, stream>>>(arguments...);
  return launch_status("launching int4_mm_kernel");
}

Status make_tensor_maps(const Params& p, const Plan& plan, bool half, TensorMaps* maps) {
  using Size = cuuint64_t;
  const Size k_tiles = p.k_tiles, row_tiles = p.row_tiles, groups = p.groups, group_bytes = p.group_bytes;
  const cuuint32_t box_rows = plan.tile_n / kTileN, box_groups = p.group_shift < 0 ? 2 : 1;
  const TensorShape weight{
      {kTileBytes / 4, k_tiles, row_tiles}, {kTileBytes, k_tiles * kTileBytes}, {kTileBytes / 4, 1, box_rows}};
  const TensorShape scales{{group_bytes / 2, groups, row_tiles},
                           {group_bytes, groups * group_bytes},
                           {static_cast<cuuint32_t>(group_bytes / 2), box_groups, box_rows}};
  const Size part_stride = p.parts > 1 ? p.part_stride : p.x_stride;
  const TensorShape x{{static_cast<Size>(p.k), static_cast<Size>(p.parts), static_cast<Size>(p.m)},
                      {part_stride * 2, static_cast<Size>(p.x_stride) * 2},
                      {kTileK, 1, static_cast<cuuint32_t>(plan.tile_m)}};
  Status status =
      encode_tensor_map(&maps->weight, p.weight, CU_TENSOR_MAP_DATA_TYPE_UINT32, weight, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (status.ok())
    status =
        encode_tensor_map(&maps->scales, p.scales, CU_TENSOR_MAP_DATA_TYPE_UINT16, scales, CU_TENSOR_MAP_SWIZZLE_NONE);
  if (status.ok()) {
    const CUtensorMapDataType dtype = half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
    status = encode_tensor_map(&maps->x, p.x, dtype, x, CU_TENSOR_MAP_SWIZZLE_128B);
  }
  return status;
}

// Weights are on their way before the kernel ahead of this one has ended (programmatic dependent launch).
Status launch_decode(const Problem& problem, const Plan& plan, const Params& params, cudaStream_t stream) {
  const DecodeKernel kernel = decode_kernel(plan.config);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  const int clusters = static_cast<int>(plan.ctas / plan.split_k);
  DecodeParams decode;
  int shared_bytes;
  if (!decode_params(problem, kDecode[plan.config], plan.split_k, clusters, static_cast<int>(plan.shared_bytes),
                     &decode, &shared_bytes)) {
    return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
  }
  cudaLaunchAttribute attributes[2]{};
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {static_cast<unsigned>(plan.split_k), 1, 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(plan.split_k, clusters);
  config.blockDim = dim3(plan.warps * 32);
  config.dynamicSmemBytes = plan.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = plan.split_k > 1 ? 2 : 1;
  return cuda_status(cudaLaunchKernelEx(&config, kernel, params, decode), "launching the kernel for few tokens");
}

unsigned blocks(int64_t threads, int per_block) { return static_cast<unsigned>((threads + per_block - 1) / per_block); }

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const bool decode = plan.kernel == std::string_view("decode");  // adds split K itself
  const Workspace layout = workspace_of(problem, decode ? 1 : plan.split_k);
  uint8_t* workspace = static_cast<uint8_t*>(arguments.workspace);
  const bool split_x = problem.x_dtype == DType::kFloat32;
  const bool finish = layout.partials >= 0;

  Params params{};
  params.x = arguments.x;
  params.x_stride = arguments.x_stride;
  params.weight = arguments.weight;
  params.scales = static_cast<const uint8_t*>(arguments.scales);
  params.bias = finish ? nullptr : arguments.bias;
  params.y = finish ? workspace + layout.partials : arguments.y;
  params.m = problem.m;
  params.n = static_cast<int>(problem.n);
  params.k = static_cast<int>(problem.k);
  params.row_tiles = static_cast<int>(tiles_n(problem.n));
  params.k_tiles = static_cast<int>(tiles_k(problem.k));
  params.parts = 1;
  params.groups = static_cast<int>(problem.groups());
  params.group_shift = group_shift(problem.group_size, problem.k);
  params.group_bytes = (problem.has_zeros ? 2 : 1) * kTileN * size_of(problem.scale_dtype);
  params.scale_chunk_shift = log2_of(params.group_bytes / 16) + (params.group_shift < 0 ? 1 : 0);
  params.x_aligned = problem.x_aligned;
  params.scale_dtype = problem.scale_dtype;
  params.bias_dtype = problem.bias_dtype;
  params.y_dtype = finish ? DType::kFloat32 : problem.x_dtype;
  params.split_k = plan.split_k;

  if (decode) return launch_decode(problem, plan, params, stream);

  float* group_sums = layout.group_sums >= 0 ? reinterpret_cast<float*>(workspace + layout.group_sums) : nullptr;
  if (split_x) {
    uint16_t* parts = reinterpret_cast<uint16_t*>(workspace + layout.parts);
    split_float32_kernel<<<blocks(problem.m * problem.groups() * 32, 256), 256, 0, stream>>>(
        static_cast<const float*>(arguments.x), arguments.x_stride, problem.m, params.k,
        static_cast<int>(problem.group_size), params.groups, static_cast<int>(layout.part_stride), parts, group_sums);
    if (Status status = launch_status("launching split_float32_kernel"); !status.ok()) return status;
    params.x = parts;
    params.parts = kFloat32Parts;
    params.part_stride = static_cast<int>(layout.part_stride);
    params.x_stride = kFloat32Parts * layout.part_stride;
    params.x_aligned = true;
  }

  // The kernel applies zero points itself, except to a split x, where its rounding would show.
  const bool half = problem.x_dtype == DType::kFloat16, zeros = problem.has_zeros && !split_x;
  if (plan.kernel == std::string_view("sm90")) {
    TensorMaps maps;
    if (Status status = make_tensor_maps(params, plan, half, &maps); !status.ok()) return status;
    if (Status status = launch_product(sm90_kernel(plan.config, half, zeros), plan, stream, params, maps);
        !status.ok()) {
      return status;
    }
  } else if (Status status = launch_product(sm80_kernel(plan.config, half, zeros), plan, stream, params);
             !status.ok()) {
    return status;
  }
  if (!finish) return {};

  FinishParams last{};
  last.partials = reinterpret_cast<const float*>(params.y);
  last.splits = plan.split_k;
  last.group_sums = group_sums;
  last.scales = arguments.scales;
  last.bias = arguments.bias;
  last.y = arguments.y;
  last.m = problem.m;
  last.n = params.n;
  last.groups = params.groups;
  last.scale_dtype = problem.scale_dtype;
  last.bias_dtype = problem.bias_dtype;
  last.y_dtype = problem.x_dtype;
  finish_kernel<<<blocks(problem.m * ((problem.n + 3) / 4), 256), 256, 0, stream>>>(last);
  return launch_status("launching finish_kernel");
}

}  // namespace qao::int4_mm
