// GPTQ rounding kernel: one warp per row, columns strided over lanes, ratios in shared memory.
#include <cuda_fp8.h>

#include "common/check.h"
#include "common/quantize.cuh"
#include "qao/gptq.h"

namespace qao::gptq {
inline namespace columns_kernels {

constexpr int kRows = 32;               // rows per CTA, one warp each
constexpr int kOwn = kMaxColumns / 32;  // columns per lane
constexpr int kPadded = kRows + 1;      // avoids bank conflicts along columns and rows
constexpr size_t kSharedBytes = (kMaxColumns * kMaxColumns + kMaxColumns * kPadded) * sizeof(float);

template <Format format>
__device__ __forceinline__ float nearest(float quotient, float zero) {
  if constexpr (format == Format::kFp8) {
    const uint16_t pair = quantize::to_fp8_pair(quotient, 0);
    return __half2float(__half(__nv_cvt_fp8_to_halfraw(static_cast<__nv_fp8_storage_t>(pair), __NV_E4M3)));
  } else {
    constexpr float kLow = format == Format::kInt4 ? 0 : -127, kHigh = format == Format::kInt4 ? 15 : 127;
    return fminf(fmaxf(rintf(__fadd_rn(quotient, zero)), kLow), kHigh);
  }
}

template <Format format>
__device__ __forceinline__ uint8_t byte_of(float code) {
  if constexpr (format == Format::kFp8) return static_cast<uint8_t>(quantize::to_fp8_pair(code, 0));
  return static_cast<uint8_t>(static_cast<int>(code));
}

template <Format format>
__global__ void __launch_bounds__(32 * kRows) columns_kernel(Problem p, Arguments a) {
  extern __shared__ float shared[];
  float* ratios = shared;                            // [128, 128], 0 up to the diagonal
  float* tile = shared + kMaxColumns * kMaxColumns;  // [128, 33]: transposes between global memory and lanes
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, columns = static_cast<int>(p.columns);
  const int64_t first_row = int64_t{blockIdx.x} * kRows;
  const bool inside = first_row + lane < p.rows;

  // Load the ratios
  for (int i = warp; i < kMaxColumns; i += kRows) {
    for (int j = lane; j < kMaxColumns; j += 32) {
      ratios[i * kMaxColumns + j] = j > i && j < columns ? a.ratios[i * columns + j] : 0;
    }
  }
  const auto load = [&](const float* from, float missing, float (&to)[kOwn]) {
    __syncthreads();
    for (int c = warp; c < kMaxColumns; c += kRows) {
      tile[c * kPadded + lane] = from && inside && c < columns ? from[c * p.rows + first_row + lane] : missing;
    }
    __syncthreads();
#pragma unroll
    for (int o = 0; o < kOwn; ++o) to[o] = tile[(32 * o + lane) * kPadded + warp];
  };
  // Calls put(index, value) for the lanes' values in `from`.
  const auto store = [&](const float (&from)[kOwn], const auto& put) {
    __syncthreads();
#pragma unroll
    for (int o = 0; o < kOwn; ++o) tile[(32 * o + lane) * kPadded + warp] = from[o];
    __syncthreads();
    if (!inside) return;
    for (int c = warp; c < columns; c += kRows) put(c * p.rows + first_row + lane, tile[c * kPadded + lane]);
  };

  float weight[kOwn], value[kOwn], scale[kOwn], zero[kOwn];
  load(a.weight, 0, weight), load(a.moved, 0, value), load(a.scales, 1, scale), load(a.zeros, 0, zero);
#pragma unroll
  for (int o = 0; o < kOwn; ++o) value[o] += weight[o];

  const auto code_of = [&](int o) { return nearest<format>(__fdiv_rn(value[o], scale[o]), zero[o]); };
  const auto meant_by = [&](float code, int o) { return __fmul_rn(__fsub_rn(code, zero[o]), scale[o]); };
  // Round column by column, and feed back errors
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    const int count = min(32, columns - 32 * o);
    for (int i = 0; i < count; ++i) {
      // Every lane rounds its column: the value of lane i is final, and ratios of 0 keep it unchanged.
      const float error = __shfl_sync(~0u, weight[o] - meant_by(code_of(o), o), i);
      const float* row = ratios + (32 * o + i) * kMaxColumns + lane;
#pragma unroll
      for (int later = o; later < kOwn; ++later) value[later] = fmaf(error, row[32 * later], value[later]);
    }
  }

  // Store codes and errors
  float code[kOwn], error[kOwn], rest[kOwn];
#pragma unroll
  for (int o = 0; o < kOwn; ++o) {
    code[o] = code_of(o);
    error[o] = weight[o] - meant_by(code[o], o), rest[o] = value[o] - meant_by(code[o], o);
  }
  store(code, [&](int64_t at, float v) { a.codes[at] = byte_of<format>(v); });
  store(error, [&](int64_t at, float v) { a.errors[at] = v; });
  store(rest, [&](int64_t at, float v) { a.rests[at] = v; });
}

template <Format format>
Status launch(const Problem& p, const Arguments& a, cudaStream_t stream) {
  const auto kernel = columns_kernel<format>;
  const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  if (error != cudaSuccess) return cuda_status(error, "setting up columns_kernel");
  const unsigned grid = static_cast<unsigned>((p.rows + kRows - 1) / kRows);
  kernel<<<grid, 32 * kRows, kSharedBytes, stream>>>(p, a);
  return launch_status("launching columns_kernel");
}

}  // namespace columns_kernels

Status round_columns(const Problem& p, const Arguments& a, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  if (p.codes == Format::kInt4) return launch<Format::kInt4>(p, a, stream);
  if (p.codes == Format::kInt8) return launch<Format::kInt8>(p, a, stream);
  return launch<Format::kFp8>(p, a, stream);
}

}  // namespace qao::gptq
