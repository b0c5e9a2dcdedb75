// Carries out a plan: at most three kernels on one stream. split float32 x -> product -> finish (split-K, zero points).
#include <algorithm>
#include <string_view>

#include "common/check.h"
#include "common/float32.cuh"
#include "common/integers.h"
#include "common/launch.h"
#include "common/shared_memory.h"
#include "common/tensor_map.h"
#include "int4/layout.h"
#include "int4_mm/kernels.h"
#include "int4_mm/sm90.h"
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

Status launch_product(Sm80Kernel kernel, const Plan& plan, const Params& params, cudaStream_t stream) {
  const int shared_bytes = static_cast<int>(plan.shared_bytes);
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  const dim3 grid(static_cast<unsigned>(plan.ctas / plan.split_k), plan.split_k);
  kernel<<<grid, plan.warps * 32, shared_bytes, stream>>>(params);
  return launch_status("launching int4_mm_kernel");
}

// Weights are on their way before the kernel ahead of this one has ended (programmatic dependent launch).
template <typename... Cut>
Status launch_streaming(const char* doing, void (*kernel)(Params, Cut...), dim3 grid, const Plan& plan,
                        cudaStream_t stream, const Params& params, const Cut&... cut) {
  if (Status status = grant_shared_memory(reinterpret_cast<const void*>(kernel)); !status.ok()) return status;
  Launch launch{grid, dim3(plan.warps * 32), stream};
  launch.shared_bytes = plan.shared_bytes;
  launch.cluster = plan.split_k;
  launch.overlapped = true;
  launch.streamed = params.weight, launch.streamed_bytes = int4::weight_bytes(params.n, params.k);
  return launch_kernel(launch, doing, kernel, params, cut...);
}

// Of x [m, k], in boxes of 64 columns and all tokens.
Status make_x_map(const Problem& problem, const Params& params, CUtensorMap* map) {
  const cuuint64_t row_bytes = static_cast<cuuint64_t>(params.x_stride) * 2;
  const TensorShape shape{{static_cast<cuuint64_t>(problem.k), 1, static_cast<cuuint64_t>(problem.m)},
                          {row_bytes, row_bytes},
                          {kBoxColumns, 1, static_cast<cuuint32_t>(problem.m)}};
  return encode_tensor_map(map, params.x, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, shape, CU_TENSOR_MAP_SWIZZLE_128B);
}

// How the body cuts the problem follows from the plan: the same function told plan() how much memory that takes.
Status launch_few_tokens(const Problem& problem, const Plan& plan, const Params& params, cudaStream_t stream) {
  const int clusters = static_cast<int>(plan.ctas / plan.split_k), room = static_cast<int>(plan.shared_bytes);
  const std::string_view kernel = plan.kernel;
  DecodeParams decode;
  FewParams few;
  SharedParams shared;
  int shared_bytes;
  if (kernel == "decode" &&
      decode_params(problem, kDecode[plan.config], plan.split_k, clusters, room, &decode, &shared_bytes)) {
    const DecodeKernel of = decode_kernel(plan.config, decode.groups_of_step / decode.columns_of_token,
                                          problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching the kernel for few tokens", of, dim3(plan.split_k, clusters), plan, stream,
                            params, decode);
  }
  if (kernel == "few" && few_params(problem, kFewConfigs[plan.config], clusters, room, &few, &shared_bytes)) {
    const FewKernel of = few_kernel(plan.config, problem.x_dtype == DType::kFloat16, few.groups_of_step,
                                    problem.has_zeros, problem.scale_dtype);
    return launch_streaming("launching the kernel for at most eight tokens", of, dim3(clusters), plan, stream, params,
                            few);
  }
  if (kernel == "shared" && shared_params(problem, kShared[plan.config], clusters, room, &shared, &shared_bytes)) {
    CUtensorMap x;
    if (Status status = make_x_map(problem, params, &x); !status.ok()) return status;
    const SharedKernel of = shared_kernel(plan.config, problem.x_dtype == DType::kFloat16, problem.has_zeros,
                                          problem.scale_dtype == DType::kFloat16);
    return launch_streaming("launching the kernel for 9 to 16 tokens and a small x", of, dim3(clusters), plan, stream,
                            params, shared, x);
  }
  return Status::error("the plan's shared memory does not hold the problem", "Plan for this problem");
}

Status launch_sm90(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream) {
  mm8::Arguments a;
  a.x = arguments.x, a.x_stride = arguments.x_stride;
  a.weight = arguments.weight, a.scales = arguments.scales;
  a.bias = arguments.bias;
  a.y = arguments.y, a.workspace = arguments.workspace;
  return mm8::launch(sm90_problem(problem), plan_as<mm8::Plan>(plan), a, stream);
}

unsigned blocks(int64_t threads, int per_block) { return static_cast<unsigned>((threads + per_block - 1) / per_block); }

}  // namespace

Status launch(const Problem& problem, const Plan& plan, const Arguments& arguments, void* stream_handle) {
  if (plan.kernel == std::string_view("sm90")) return launch_sm90(problem, plan, arguments, stream_handle);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const bool sm80 = plan.kernel == std::string_view("sm80");
  const Workspace layout = workspace_of(problem, sm80 ? plan.split_k : 1);  // the others add split K themselves
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
  params.residual = arguments.residual, params.residual_stride = arguments.residual_stride;
  params.norm_weight = arguments.norm_weight;
  params.sum = arguments.sum;
  params.eps = arguments.eps;

  if (!sm80) return launch_few_tokens(problem, plan, params, stream);

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

  const bool half = problem.x_dtype == DType::kFloat16;
  const Sm80Kernel kernel = sm80_kernel(plan.config, half, problem.has_zeros);
  if (Status status = launch_product(kernel, plan, params, stream); !status.ok()) return status;
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
