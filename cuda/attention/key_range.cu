// The range of keys that a mask counts, for attention of one token: one CTA per sequence.
#include "attention/mask.cuh"
#include "common/launch.h"
#include "common/ptx.cuh"
#include "qao/token_attention.h"

namespace qao::attention {
inline namespace key_range_kernels {

constexpr int kScanWarps = 8, kScanThreads = kScanWarps * 32;

struct Found {
  int begin, end, count;  // of the keys that count
  unsigned adds;          // 1 if the mask adds to a score
};

__device__ __forceinline__ Found scan(const KeyMask& mask, int64_t start, int keys, float excluding,
                                      Found (&of_warps)[kScanWarps]) {
  Found found{keys, 0, 0, 0};
  for (int key = static_cast<int>(threadIdx.x); key < keys; key += kScanThreads) {
    const float value = load_mask_value(mask.data, mask.kind, mask.dtype, start + key * mask.key_stride);
    if (value <= excluding) continue;
    found = {min(found.begin, key), key + 1, found.count + 1, found.adds | static_cast<unsigned>(value != 0)};
  }
  found = {__reduce_min_sync(~0u, found.begin), __reduce_max_sync(~0u, found.end), __reduce_add_sync(~0u, found.count),
           __reduce_or_sync(~0u, found.adds)};
  __syncthreads();  // `of_warps` of a previous scan was read
  if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = found;
  __syncthreads();
  found = {keys, 0, 0, 0};
#pragma unroll
  for (const Found& part : of_warps) {
    found = {min(found.begin, part.begin), max(found.end, part.end), found.count + part.count, found.adds | part.adds};
  }
  return found;
}

__global__ void __launch_bounds__(kScanThreads)
    key_range_kernel(const __grid_constant__ KeyMask mask, int keys, float excluding, KeyRange* ranges) {
  __shared__ Found of_warps[kScanWarps];
  ptx::wait_then_launch_dependents();
  const int64_t start = blockIdx.x * mask.batch_stride;
  Found found = scan(mask, start, keys, excluding, of_warps);
  // Softmax of a row with all keys masked by finite values depends on these values alone.
  const bool finite = found.count == 0 && mask.kind == Mask::kFloat;
  if (finite) found = scan(mask, start, keys, -INFINITY, of_warps);
  const bool plain = found.count == found.end - found.begin && !found.adds;
  if (threadIdx.x == 0) ranges[blockIdx.x] = {found.begin, found.end, plain, finite};
}

}  // namespace key_range_kernels

Status launch_key_range(const KeyMask& mask, int64_t batch, int64_t keys, KeyRange* ranges, void* stream) {
  Launch launch{dim3(static_cast<unsigned>(batch)), dim3(kScanThreads), static_cast<cudaStream_t>(stream)};
  launch.overlapped = is_hopper_code(reinterpret_cast<const void*>(key_range_kernel));
  return launch_kernel(launch, "launching attention::key_range_kernel", key_range_kernel, mask, static_cast<int>(keys),
                       largest_excluding(mask.kind, mask.dtype), ranges);
}

}  // namespace qao::attention
