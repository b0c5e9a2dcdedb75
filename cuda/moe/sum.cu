// MoE unpermute: weighted sum of the rows of a token's experts.
//
// A thread has eight columns of a token, and loads the rows of several experts at once.
#include <algorithm>

#include "common/integers.h"
#include "common/launch.h"
#include "common/quantize.cuh"
#include "qao/moe.h"

namespace qao::experts {
inline namespace sum_kernels {

using quantize::kVector;
using quantize::Packed;

constexpr int kMostThreads = 128, kAtOnce = 4;

template <DType dtype, bool kFast>
__global__ void __launch_bounds__(kMostThreads) sum_kernel(const __grid_constant__ Sum s) {
  ptx::wait_then_launch_dependents();
  const int columns = static_cast<int>(s.columns);
  const int column = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x) * kVector;
  if (column >= columns) return;
  const int64_t row_bytes = s.columns * size_of(dtype), token = blockIdx.x;
  float sum[kVector] = {};
  for (int64_t first = 0; first < s.top_k; first += kAtOnce) {
    Packed<dtype> row[kAtOnce];
    float weight[kAtOnce];
    bool there[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t slot = token * s.top_k + first + i;
      there[i] = first + i < s.top_k;
      const int place = there[i] ? s.places[slot] : 0;
      there[i] = there[i] && place >= 0 && place < s.count;
      if (!there[i]) continue;
      weight[i] = load_float(s.weights, slot, s.weights_dtype);
      row[i].template load<kFast>(static_cast<const char*>(s.rows) + place * row_bytes, column, columns);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (!there[i]) continue;
      float value[kVector];
      row[i].unpack(value);
#pragma unroll
      for (int c = 0; c < kVector; ++c) sum[c] = fmaf(weight[i], value[c], sum[c]);
    }
  }
  Packed<dtype> result;
  result.pack(sum);
  result.template store<kFast>(static_cast<char*>(s.y) + token * row_bytes, column, columns);
}

template <DType dtype>
Status launch_dtype(const Sum& sum, cudaStream_t stream) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  const bool fast = sum.columns % kVector == 0 && aligned(sum.rows) && aligned(sum.y);
  const auto kernel = fast ? sum_kernel<dtype, true> : sum_kernel<dtype, false>;
  const int64_t vectors = ceil_div(sum.columns, int64_t{kVector});
  const unsigned threads = static_cast<unsigned>(std::min<int64_t>(ceil_div(vectors, int64_t{32}) * 32, kMostThreads));
  const dim3 grid(static_cast<unsigned>(sum.tokens), static_cast<unsigned>(ceil_div(vectors, int64_t{threads})));
  Launch launch{grid, dim3(threads), stream};
  launch.overlapped = is_hopper_code(reinterpret_cast<const void*>(kernel));
  return launch_kernel(launch, "launching the sum of experts", kernel, sum);
}

}  // namespace sum_kernels

Status launch(const Sum& sum, void* stream) {
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  switch (sum.dtype) {
    case DType::kFloat32:
      return launch_dtype<DType::kFloat32>(sum, on);
    case DType::kFloat16:
      return launch_dtype<DType::kFloat16>(sum, on);
    case DType::kBFloat16:
      return launch_dtype<DType::kBFloat16>(sum, on);
  }
  return Status::error("sum of experts: unknown dtype");
}

}  // namespace qao::experts
