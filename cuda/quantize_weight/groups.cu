// Quantization of float weights to integers by groups.
// quantize_group.h with sixteen threads per group, one per lane.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "common/check.h"
#include "common/convert.cuh"
#include "common/integers.h"
#include "qao/quantize_group.h"

namespace qao::groups {
inline namespace groups_kernels {

constexpr int kThreads = 256, kGroupsOfCta = kThreads / kLanes;
constexpr int kAdders = 1024;

__device__ __forceinline__ int own_lane() { return threadIdx.x % kLanes; }
// Mask of the group's threads. The two groups of a warp may diverge.
__device__ __forceinline__ unsigned own_group() { return 0xFFFFu << (threadIdx.x & kLanes); }

// `count` values in memory, then zeros.
template <typename T>
struct Stored {
  const T* data;
  int64_t count;
  __device__ Stored operator+(int64_t i) const { return {data + i, count - i}; }
};
// `count` ones, then zeros.
struct Ones {
  int64_t count;
  __device__ Ones operator+(int64_t i) const { return {count - i}; }
};

// This thread's lane.
struct Lane {
  float v;
  static __device__ Lane all(float value) { return {value}; }
  template <typename T>
  static __device__ Lane load(const Stored<T>& values) {
    return {own_lane() < values.count ? static_cast<float>(values.data[own_lane()]) : 0.0f};
  }
  static __device__ Lane load(Ones values) { return {own_lane() < values.count ? 1.0f : 0.0f}; }
};

__device__ __forceinline__ Lane add(Lane x, Lane y) { return {x.v + y.v}; }
__device__ __forceinline__ Lane sub(Lane x, Lane y) { return {x.v - y.v}; }
__device__ __forceinline__ Lane mul(Lane x, Lane y) { return {x.v * y.v}; }
__device__ __forceinline__ Lane div(Lane x, Lane y) { return {x.v / y.v}; }
__device__ __forceinline__ Lane least(Lane x, Lane y) { return {fminf(x.v, y.v)}; }
__device__ __forceinline__ Lane largest(Lane x, Lane y) { return {fmaxf(x.v, y.v)}; }
__device__ __forceinline__ float lowest_of(Lane x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) x.v = fminf(x.v, __shfl_xor_sync(own_group(), x.v, half));
  return x.v;
}
__device__ __forceinline__ float sum_of(Lane x) {
#pragma unroll
  for (int half = kLanes / 2; half > 0; half /= 2) x.v += __shfl_xor_sync(own_group(), x.v, half);
  return x.v;
}

struct Place {
  static __device__ float rounded_to(DType dtype, float value) {
    if (dtype == DType::kFloat32) return value;
    return dtype == DType::kBFloat16 ? __bfloat162float(__float2bfloat16_rn(value))
                                     : __half2float(__float2half_rn(value));
  }
  static __device__ Ones first_lanes(int64_t count) { return {count}; }
  static __device__ void put_bytes(Lane lane, uint8_t* q, int64_t count) {
    if (own_lane() < count) q[own_lane()] = static_cast<uint8_t>(__float_as_uint(lane.v));
  }
};

struct Params {
  Rules rules;
  float factors[kMaxFactors];
  int64_t n, k, groups;
  Arguments arguments;
};

template <typename T, bool kAlike>
__global__ void __launch_bounds__(kThreads) groups_kernel(const __grid_constant__ Params p) {
  __shared__ float errors[kGroupsOfCta], norms[kGroupsOfCta];
  const Arguments& a = p.arguments;
  const int slot = threadIdx.x / kLanes;
  const int64_t group = int64_t{blockIdx.x} * kGroupsOfCta + slot;
  Group found;
  if (group < p.n * p.groups) {
    const int64_t row = group / p.groups, first = group % p.groups * p.rules.size;
    const int64_t count = min(p.rules.size, p.k - first);
    Rules rules = p.rules;
    rules.factors = p.factors;
    const Stored<T> values{static_cast<const T*>(a.weight) + row * a.weight_stride + first, count};
    uint8_t* q = a.q + row * p.k + first;
    if constexpr (kAlike) {
      found = quantize_group<Lane, Place>(rules, values, Ones{count}, count, q);
    } else {
      found = quantize_group<Lane, Place>(rules, values, Stored<float>{a.importance + first, count}, count, q);
    }
    if (own_lane() == 0) {
      store_float(a.scales, group, rules.scale_dtype, found.scale);
      store_float(a.zeros, group, rules.scale_dtype, found.zero);
    }
  }
  if (own_lane() == 0) errors[slot] = found.error, norms[slot] = found.norm;
  __syncthreads();
  if (threadIdx.x > 0) return;
  double error = 0, norm = 0;
  for (int i = 0; i < kGroupsOfCta; ++i) error += errors[i], norm += norms[i];
  a.workspace[2 * int64_t{blockIdx.x}] = error, a.workspace[2 * int64_t{blockIdx.x} + 1] = norm;
}

// Adds up both squares over CTAs in a fixed order.
__global__ void __launch_bounds__(kAdders) add_up_kernel(const double* parts, int64_t count, double* squares) {
  __shared__ double sums[kAdders];
  for (int which = 0; which < 2; ++which) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < count; i += kAdders) sum += parts[2 * i + which];
    sums[threadIdx.x] = sum;
    for (int half = kAdders / 2; half > 0; half /= 2) {
      __syncthreads();
      if (threadIdx.x < half) sums[threadIdx.x] += sums[threadIdx.x + half];
    }
    if (threadIdx.x == 0) squares[which] = sums[0];
    __syncthreads();  // the next iteration overwrites what the last sum reads
  }
}

int64_t ctas_of(const Problem& p) { return ceil_div(p.n * p.groups(), int64_t{kGroupsOfCta}); }

template <typename T>
Status launch_dtype(const Params& params, int64_t ctas, cudaStream_t stream) {
  const auto kernel = params.arguments.importance ? groups_kernel<T, false> : groups_kernel<T, true>;
  kernel<<<static_cast<unsigned>(ctas), kThreads, 0, stream>>>(params);
  if (Status status = launch_status("launching groups_kernel"); !status.ok()) return status;
  add_up_kernel<<<1, kAdders, 0, stream>>>(params.arguments.workspace, ctas, params.arguments.squares);
  return launch_status("launching add_up_kernel");
}

}  // namespace groups_kernels

int64_t workspace_doubles(const Problem& problem) { return 2 * ctas_of(problem); }

Status launch(const Problem& p, const Arguments& arguments, void* stream_handle) {
  Params params{rules_of(p), {}, p.n, p.k, p.groups(), arguments};
  std::copy(p.factors, p.factors + p.factor_count, params.factors);
  const int64_t ctas = ctas_of(p);
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (p.weight_dtype == DType::kFloat32) return launch_dtype<float>(params, ctas, stream);
  if (p.weight_dtype == DType::kFloat16) return launch_dtype<__half>(params, ctas, stream);
  return launch_dtype<__nv_bfloat16>(params, ctas, stream);
}

}  // namespace qao::groups
