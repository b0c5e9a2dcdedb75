// Top-k expert selection and weights, one warp per token.
//
// Scores are in shared memory. For each choice, lanes find the best of their scores, and a warp reduction the best of
// all.
#include <algorithm>
#include <climits>

#include "common/convert.cuh"
#include "common/integers.h"
#include "common/launch.h"
#include "common/ptx.cuh"
#include "qao/moe.h"

namespace qao::experts {
inline namespace top_k_kernels {

constexpr int kMostWarps = 8, kMostExperts = 2048;

// Maps floats to unsigned integers of the same order, NaN above all; 0 is below all.
__device__ __forceinline__ uint32_t order_of(float value) {
  const uint32_t bits = __float_as_uint(value);
  if (isnan(value)) return ~0u;
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Argmax; ties go to the lowest index.
struct Best {
  uint32_t key = 0;
  int number = INT_MAX;
  __device__ __forceinline__ void meet(uint32_t other_key, int other_number) {
    if (other_key > key || (other_key == key && other_number < number)) key = other_key, number = other_number;
  }
  __device__ __forceinline__ void reduce_over_warp() {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      meet(__shfl_xor_sync(~0u, key, distance), __shfl_xor_sync(~0u, number, distance));
    }
  }
};

__device__ __forceinline__ float max_over_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, distance));
  return value;
}
__device__ __forceinline__ float sum_over_warp(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(~0u, value, distance);
  return value;
}

// Sets the keys of experts outside the best groups to 0. A group's rank is the sum of its two best experts.
__device__ __forceinline__ void leave_groups(const TopK& t, const float* biased, uint32_t* keys, int lane) {
  const int size = t.experts / t.groups;
  uint32_t own = 0;  // rank of group `lane`
  for (int g = 0; g < t.groups; ++g) {
    float first = -INFINITY, second = -INFINITY;
    const auto add = [&](float value) { second = fmaxf(second, fminf(first, value)), first = fmaxf(first, value); };
    for (int i = lane; i < size; i += 32) add(biased[g * size + i]);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      const float other_first = __shfl_xor_sync(~0u, first, distance),
                  other_second = __shfl_xor_sync(~0u, second, distance);
      add(other_first), add(other_second);
    }
    if (lane == g) own = order_of(size == 1 ? first : first + second);
  }
  uint32_t kept = 0;  // bitmask of groups
  for (int i = 0; i < t.top_groups; ++i) {
    Best best{own, lane};
    best.reduce_over_warp();
    kept |= 1u << best.number;
    if (lane == best.number) own = 0;
  }
  for (int e = lane; e < t.experts; e += 32) {
    if (!(kept >> (e / size) & 1)) keys[e] = 0;
  }
}

__global__ void __launch_bounds__(kMostWarps * 32) top_k_kernel(const __grid_constant__ TopK t) {
  extern __shared__ float shared[];  // [warps, 3, experts]: scores, biased scores, keys of biased scores
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int64_t token = int64_t{blockIdx.x} * (blockDim.x / 32) + warp;
  float* const scores = shared + warp * 3 * t.experts;
  float* const biased = scores + t.experts;
  uint32_t* const keys = reinterpret_cast<uint32_t*>(biased + t.experts);
  ptx::wait_then_launch_dependents();
  if (token >= t.tokens) return;

  // Compute scores
  float largest = -INFINITY;
  for (int e = lane; e < t.experts; e += 32) {
    scores[e] = load_float(t.logits, token * t.experts + e, t.logits_dtype);
    largest = fmaxf(largest, scores[e]);
  }
  float factor = 1;
  if (t.scores == Scores::kSoftmax) {
    largest = max_over_warp(largest);
    float sum = 0;
    for (int e = lane; e < t.experts; e += 32) sum += scores[e] = expf(scores[e] - largest);
    factor = 1 / sum_over_warp(sum);
  }
  for (int e = lane; e < t.experts; e += 32) {
    const float score = t.scores == Scores::kSoftmax ? scores[e] * factor : 1 / (1 + expf(-scores[e]));
    scores[e] = score;
    biased[e] = t.bias == nullptr ? score : score + load_float(t.bias, e, t.bias_dtype);
    keys[e] = order_of(biased[e]);
  }
  __syncwarp();
  if (t.groups > 1) leave_groups(t, biased, keys, lane);
  __syncwarp();

  // Select the top k
  int64_t* const chosen = t.chosen + token * t.top_k;
  float* const weights = t.weights + token * t.top_k;
  float sum = 0;
  for (int choice = 0; choice < t.top_k; ++choice) {
    Best best;
    for (int e = lane; e < t.experts; e += 32) best.meet(keys[e], e);
    best.reduce_over_warp();
    const float score = scores[best.number];
    sum += score;
    if (lane == 0) {
      chosen[choice] = best.number, weights[choice] = score;
      keys[best.number] = 0;
    }
    __syncwarp();
  }
  // Normalize the weights
  const float scale = t.factor / (t.normalized ? sum + kLeastSum : 1);
  for (int choice = lane; choice < t.top_k; choice += 32) weights[choice] *= scale;
}

}  // namespace top_k_kernels

Status launch(const TopK& top_k, void* stream) {
  if (top_k.experts > kMostExperts) {
    return Status::error("a GPU chooses among up to 2048 experts, not " + std::to_string(top_k.experts),
                         "Choose with torch.topk");
  }
  const size_t bytes = 3 * sizeof(float) * static_cast<size_t>(top_k.experts);
  const size_t warps = std::min<size_t>(top_k.tokens <= 256 ? 1 : kMostWarps, (48 << 10) / bytes);
  const dim3 grid(static_cast<unsigned>(ceil_div(top_k.tokens, static_cast<int64_t>(warps))));
  Launch launch{grid, dim3(static_cast<unsigned>(warps) * 32), static_cast<cudaStream_t>(stream)};
  launch.shared_bytes = warps * bytes;
  launch.overlapped = is_hopper_code(reinterpret_cast<const void*>(&top_k_kernel));
  return launch_kernel(launch, "launching the choice of experts", top_k_kernel, top_k);
}

}  // namespace qao::experts
