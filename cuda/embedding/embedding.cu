// Embedding lookup kernels, bound by latency and the bytes of `out`.
//
// A thread reads four bytes of W and stores their dequantized values; adjacent lanes store adjacent elements of the
// row.
#include <algorithm>

#include "common/check.h"
#include "common/convert.cuh"
#include "layout/int4.h"
#include "qao/embedding.h"

namespace qao::embedding {
inline namespace embedding_kernels {

constexpr int kThreads = 256;
constexpr int kWordsPerTile = int4::kTileK / 4;  // per row pair
constexpr int64_t kMaxGridX = (int64_t{1} << 31) - 1;

struct Sizes {
  int64_t m, n, k, groups, group_size;
  int parameters;
  bool wide_ids, one_scale, aligned;
  DType scale_dtype, out_dtype;
};

__device__ __forceinline__ int64_t load_id(const Sizes& s, const void* ids, int64_t i) {
  return s.wide_ids ? static_cast<const int64_t*>(ids)[i] : static_cast<const int32_t*>(ids)[i];
}

// Stores columns k and k + 1 of row i of out.
__device__ __forceinline__ void store_pair(const Sizes& s, void* out, int64_t i, int64_t k, float first, float second) {
  const int64_t at = i * s.k + k;
  if (k + 1 < s.k && s.k % 2 == 0) {
    store_float2(out, at, s.out_dtype, {first, second});
    return;
  }
  if (k < s.k) store_float(out, at, s.out_dtype, first);
  if (k + 1 < s.k) store_float(out, at + 1, s.out_dtype, second);
}

// A thread has one word: columns 2t, 2t + 8, 2t + 1, 2t + 9 of a k-step of 16 in rows g and g + 8, one of which is
// used.
__global__ void __launch_bounds__(kThreads)
    int4_kernel(Sizes s, const void* ids, const uint8_t* weight, const void* scales, void* out) {
  const int64_t k_tiles = int4::tiles_k(s.k), word = static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x;
  const int64_t k_tile = word / kWordsPerTile;
  if (k_tile >= k_tiles) return;
  const int byte = static_cast<int>(word % kWordsPerTile) * 4;
  const int64_t k = k_tile * int4::kTileK + int4::tile_column(byte);
  if (k >= s.k) return;
  const int64_t group = k / s.group_size;  // same for the four columns: groups begin at multiples of 32
  for (int64_t i = blockIdx.x; i < s.m; i += gridDim.x) {
    const int64_t id = load_id(s, ids, i);
    float value[4];
    if (id < 0 || id >= s.n) {
#pragma unroll
      for (float& v : value) v = __int_as_float(0x7FC00000);
    } else {
      const int row = static_cast<int>(id % int4::kTileN), pair = row % 8, shift = int4::tile_shift(row);
      const int64_t tile = id / int4::kTileN * k_tiles + k_tile;
      const uint32_t bits =
          *reinterpret_cast<const uint32_t*>(weight + tile * int4::kTileBytes + pair * int4::kTileK + byte);
      const float scale = load_float(scales, int4::scale_offset(id, group, s.groups, s.parameters, 0), s.scale_dtype);
      const float zero = s.parameters == 1
                             ? int4::kSymmetricZero
                             : load_float(scales, int4::scale_offset(id, group, s.groups, 2, 1), s.scale_dtype);
#pragma unroll
      for (int b = 0; b < 4; ++b) value[b] = (static_cast<float>(bits >> (8 * b + shift) & 15) - zero) * scale;
    }
    store_pair(s, out, i, k, value[0], value[2]);
    store_pair(s, out, i, k + 8, value[1], value[3]);
  }
}

// A thread has four columns.
__global__ void __launch_bounds__(kThreads)
    int8_kernel(Sizes s, const void* ids, const uint8_t* weight, const float* scales, void* out) {
  const int64_t k = (static_cast<int64_t>(blockIdx.y) * kThreads + threadIdx.x) * 4;
  if (k >= s.k) return;
  for (int64_t i = blockIdx.x; i < s.m; i += gridDim.x) {
    const int64_t id = load_id(s, ids, i), at = i * s.k + k;
    const bool inside = id >= 0 && id < s.n;
    const float scale = inside ? scales[s.one_scale ? 0 : id] : __int_as_float(0x7FC00000);  // NaN propagates
    const uint8_t* from = weight + (inside ? id : 0) * s.k + k;
    if (s.aligned) {
      const char4 q = *reinterpret_cast<const char4*>(from);
      store_float4(out, at, s.out_dtype, {q.x * scale, q.y * scale, q.z * scale, q.w * scale});
      continue;
    }
    for (int b = 0; b < 4 && k + b < s.k; ++b) {
      store_float(out, at + b, s.out_dtype, static_cast<float>(static_cast<int8_t>(from[b])) * scale);
    }
  }
}

}  // namespace embedding_kernels

Status launch(const Problem& p, const Arguments& a, void* stream_handle) {
  if (p.m == 0) return {};
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const bool int4 = p.weight == Format::kInt4;
  Sizes s{};
  s.m = p.m, s.n = p.n, s.k = p.k;
  s.wide_ids = p.wide_ids, s.one_scale = p.one_scale;
  s.scale_dtype = p.scale_dtype, s.out_dtype = p.out_dtype;
  s.aligned = p.k % 4 == 0 && reinterpret_cast<uintptr_t>(a.weight) % 4 == 0;
  if (int4) s.groups = p.groups(), s.group_size = p.group_size, s.parameters = p.has_zeros ? 2 : 1;
  const int64_t words = int4 ? int4::tiles_k(p.k) * kWordsPerTile : (p.k + 3) / 4;
  // Short rows use only as many warps as they have words.
  const unsigned threads = static_cast<unsigned>(std::min<int64_t>(kThreads, (words + 31) / 32 * 32));
  const dim3 grid(static_cast<unsigned>(std::min(p.m, kMaxGridX)),
                  static_cast<unsigned>((words + kThreads - 1) / kThreads));
  if (int4) {
    int4_kernel<<<grid, threads, 0, stream>>>(s, a.ids, a.weight, a.scales, a.out);
    return launch_status("launching embedding int4_kernel");
  }
  int8_kernel<<<grid, threads, 0, stream>>>(s, a.ids, a.weight, static_cast<const float*>(a.scales), a.out);
  return launch_status("launching embedding int8_kernel");
}

}  // namespace qao::embedding
