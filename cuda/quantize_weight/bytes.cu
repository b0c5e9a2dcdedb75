// Quantization of weights to int8 or e4m3: one CTA per row, or per block of 128 x 128.
// Values stay in registers until the scale is known; the rest of very long rows is read twice.
#include "common/check.h"
#include "common/integers.h"
#include "common/quantize.cuh"
#include "quantize_weight/load.cuh"
#include "quantize_weight/params.h"
#include "quantize_weight/quotient.cuh"

namespace qao::weight {
inline namespace bytes_kernels {

using quantize::kVector;
using quantize::Packed;
using quantize::Range;

constexpr int kBlockThreads = 256;
constexpr int kBlockKept = kScaleBlock * kScaleBlock / kVector / kBlockThreads;  // vectors per thread

template <DType dtype>
constexpr int kKept = dtype == DType::kFloat32 ? 2 : 4;

__device__ __forceinline__ uint32_t largest_of_cta(uint32_t value) {
  __shared__ uint32_t of_warps[32];
  const int lane = threadIdx.x % 32, warps = blockDim.x / 32;
  value = __reduce_max_sync(~0u, value);
  if (lane == 0) of_warps[threadIdx.x / 32] = value;
  __syncthreads();
  return __reduce_max_sync(~0u, lane < warps ? of_warps[lane] : 0);
}

// The scale of the CTA's row or block. Thread 0 stores it to `to`, unless null.
template <Format format>
__device__ __forceinline__ float scale_of(const Params& p, uint32_t largest, float* to) {
  constexpr float kSteps = format == Format::kFp8 ? quantize::kLargestFp8 : 127.0f;
  const float scale = fmaxf(__fdiv_rn(__uint_as_float(largest), kSteps), p.smallest);
  if (threadIdx.x == 0 && to) {
    *to = scale;
    if (largest >= 0x7F800000u) *p.fault = 1;
  }
  return scale;
}

template <Format format>
__device__ __forceinline__ uint2 round_vector(const float (&value)[kVector], const Divisor& by) {
  uint32_t word[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float t[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) t[e] = by.quotient(value[4 * i + e]);
    if constexpr (format == Format::kFp8) {
#pragma unroll
      for (int e = 0; e < 4; ++e) t[e] = copysignf(t[e], value[4 * i + e]);  // the remainder loses the sign of -0
      word[i] = quantize::to_fp8_pair(t[0], t[1]) | uint32_t{quantize::to_fp8_pair(t[2], t[3])} << 16;
    } else {
      word[i] = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int code = static_cast<int>(rintf(fminf(fmaxf(t[e], -127.0f), 127.0f)));
        word[i] |= (static_cast<uint32_t>(code) & 255) << (8 * e);
      }
    }
  }
  return {word[0], word[1]};
}

__device__ __forceinline__ void store(const Params& p, uint8_t* row, int64_t column, uint2 word) {
  if (p.aligned) {
    if (column < p.k) *reinterpret_cast<uint2*>(row + column) = word;
    return;
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (column + i < p.k) row[column + i] = static_cast<uint8_t>((i < 4 ? word.x : word.y) >> (8 * (i % 4)));
  }
}

template <DType dtype, Format format>
__global__ void __launch_bounds__(1024) rows_kernel(Params p) {
  const char* from = static_cast<const char*>(p.weight) + blockIdx.x * p.stride * size_of(dtype);
  const int k = static_cast<int>(p.k), step = blockDim.x * kVector, first = threadIdx.x * kVector;
  const bool stop = is_stopped(p);
  Packed<dtype> kept[kKept<dtype>];
#pragma unroll
  for (int i = 0; i < kKept<dtype>; ++i) load_vector<dtype>(kept[i], p, from, first + i * step, k);
  // The rest of the row: task(vector, its first column).
  const auto for_rest = [&](const auto& task) {
    for (int column = first + kKept<dtype> * step; column < k; column += step) {
      Packed<dtype> vector;
      load_vector<dtype>(vector, p, from, column, k);
      task(vector, column);
    }
  };
  // Find the scale
  uint32_t largest;
  if (p.one_scale) {
    largest = *p.largest;
  } else {
    Range range;
    const auto add = [&](const Packed<dtype>& vector) {
      float value[kVector];
      vector.unpack(value);
      range.add(value, true);
    };
#pragma unroll
    for (int i = 0; i < kKept<dtype>; ++i) add(kept[i]), kept[i].pin();
    for_rest([&](const Packed<dtype>& vector, int) { add(vector); });
    largest = largest_of_cta(range.high);
  }
  if (stop) return;
  float* scales = static_cast<float*>(p.scales);
  const Divisor by = divisor(scale_of<format>(p, largest,
                                              !p.one_scale      ? scales + blockIdx.x
                                              : blockIdx.x == 0 ? scales
                                                                : nullptr));
  // Quantize and store
  uint8_t* to = p.q + blockIdx.x * p.k;
  const auto put = [&](const Packed<dtype>& vector, int column) {
    float value[kVector];
    vector.unpack(value);
    store(p, to, column, round_vector<format>(value, by));
  };
#pragma unroll
  for (int i = 0; i < kKept<dtype>; ++i) put(kept[i], first + i * step);
  for_rest(put);
}

template <DType dtype>
__global__ void __launch_bounds__(kBlockThreads) blocks_kernel(Params p) {
  constexpr int kAcross = kScaleBlock / kVector, kDown = kBlockThreads / kAcross;
  const int64_t first_row = int64_t{blockIdx.x} / p.block_columns * kScaleBlock + threadIdx.x / kAcross;
  const int column = static_cast<int>(blockIdx.x % p.block_columns * kScaleBlock + threadIdx.x % kAcross * kVector);
  const bool stop = is_stopped(p);
  Packed<dtype> kept[kBlockKept];
#pragma unroll
  for (int i = 0; i < kBlockKept; ++i) {
    const int64_t row = first_row + i * kDown;
    const char* from = static_cast<const char*>(p.weight) + row * p.stride * size_of(dtype);
    load_vector<dtype>(kept[i], p, from, column, row < p.n ? static_cast<int>(p.k) : 0);
  }
  Range range;
#pragma unroll
  for (int i = 0; i < kBlockKept; ++i) {
    float value[kVector];
    kept[i].unpack(value);
    range.add(value, true), kept[i].pin();
  }
  const uint32_t largest = largest_of_cta(range.high);
  if (stop) return;
  const Divisor by = divisor(scale_of<Format::kFp8>(p, largest, static_cast<float*>(p.scales) + blockIdx.x));
#pragma unroll
  for (int i = 0; i < kBlockKept; ++i) {
    const int64_t row = first_row + i * kDown;
    float value[kVector];
    kept[i].unpack(value);
    if (row < p.n) store(p, p.q + row * p.k, column, round_vector<Format::kFp8>(value, by));
  }
}

// CTAs take rows in turn, from the last to the first: a following kernel that reads them in order finds the first rows
// in L2.
template <DType dtype>
__global__ void __launch_bounds__(256) largest_kernel(Params p) {
  Range range;
  for (int64_t row = blockIdx.x; row < p.n; row += gridDim.x) {
    const char* from = static_cast<const char*>(p.weight) + (p.n - 1 - row) * p.stride * size_of(dtype);
    const int k = static_cast<int>(p.k), step = blockDim.x * kVector;
    for (int column = threadIdx.x * kVector; column < k; column += 2 * step) {
      Packed<dtype> vector[2];
      float value[kVector];
#pragma unroll
      for (int i = 0; i < 2; ++i) load_vector<dtype>(vector[i], p, from, column + i * step, k);
#pragma unroll
      for (int i = 0; i < 2; ++i) vector[i].unpack(value), range.add(value, true);
    }
  }
  const uint32_t largest = largest_of_cta(range.high);
  if (threadIdx.x != 0) return;
  atomicMax(p.largest, largest);
  if (p.report && largest > p.limit) *p.fault = 1, *p.report = 1;
}

template <DType dtype, Format format>
Status launch_rows(const Params& p, cudaStream_t stream) {
  const int64_t warps = ceil_div(ceil_div(p.k, int64_t{kVector}), int64_t{32} * kKept<dtype>);
  const unsigned threads = static_cast<unsigned>(warps < 32 ? 32 * warps : 1024);
  rows_kernel<dtype, format><<<static_cast<unsigned>(p.n), threads, 0, stream>>>(p);
  return launch_status("launching rows_kernel");
}

template <DType dtype>
Status launch_blocks(const Params& p, cudaStream_t stream) {
  const unsigned grid = static_cast<unsigned>(ceil_div(p.n, kScaleBlock) * p.block_columns);
  blocks_kernel<dtype><<<grid, kBlockThreads, 0, stream>>>(p);
  return launch_status("launching blocks_kernel");
}

template <DType dtype>
Status launch(const Params& p, Format format, cudaStream_t stream) {
  return format == Format::kFp8 ? launch_rows<dtype, Format::kFp8>(p, stream)
                                : launch_rows<dtype, Format::kInt8>(p, stream);
}

template <DType dtype>
Status launch_largest(const Params& p, cudaStream_t stream) {
  largest_kernel<dtype><<<static_cast<unsigned>(p.n < 1056 ? p.n : 1056), 256, 0, stream>>>(p);
  return launch_status("launching largest_kernel");
}

}  // namespace bytes_kernels

Status quantize_rows(const Params& p, DType dtype, Format format, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch<DType::kFloat32>(p, format, stream);
  if (dtype == DType::kFloat16) return launch<DType::kFloat16>(p, format, stream);
  return launch<DType::kBFloat16>(p, format, stream);
}

Status quantize_blocks(const Params& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch_blocks<DType::kFloat32>(p, stream);
  if (dtype == DType::kFloat16) return launch_blocks<DType::kFloat16>(p, stream);
  return launch_blocks<DType::kBFloat16>(p, stream);
}

Status find_largest(const Params& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch_largest<DType::kFloat32>(p, stream);
  if (dtype == DType::kFloat16) return launch_largest<DType::kFloat16>(p, stream);
  return launch_largest<DType::kBFloat16>(p, stream);
}

}  // namespace qao::weight
