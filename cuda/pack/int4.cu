// Conversions between plain [N, K] nibbles and the packed layout.
// Only dequantize is performance-relevant: the backward pass uses it.
#include "common/check.h"
#include "common/convert.cuh"
#include "layout/int4.h"
#include "qao/int4.h"

namespace qao::int4 {
inline namespace int4_kernels {

struct Sizes {
  int64_t n, k, k_tiles, groups, group_size;
  int parameters;
  DType scale_dtype;
};

Sizes sizes_of(const Weight& w) {
  return {w.n, w.k, tiles_k(w.k), w.groups(), w.group_size, w.has_zeros ? 2 : 1, w.scale_dtype};
}

constexpr int kThreads = 256;
unsigned blocks(int64_t threads) { return static_cast<unsigned>((threads + kThreads - 1) / kThreads); }
__device__ __forceinline__ int64_t thread_index() { return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x; }

// One thread per packed byte. Values keep their low four bits.
__global__ void __launch_bounds__(kThreads) pack_weight_kernel(Sizes s, const uint8_t* q, uint8_t* weight) {
  const int64_t index = thread_index();
  if (index >= weight_bytes(s.n, s.k)) return;
  const int byte = static_cast<int>(index % kTileBytes);
  const int64_t tile = index / kTileBytes, row = tile / s.k_tiles * kTileN + byte / kTileK;
  const int64_t k = tile % s.k_tiles * kTileK + tile_column(byte % kTileK);
  const auto nibble = [&](int64_t n) -> int { return n < s.n && k < s.k ? q[n * s.k + k] & 15 : kSymmetricZero; };
  weight[index] = static_cast<uint8_t>(nibble(row) | nibble(row + 8) << 4);
}

// One thread per scale and zero point.
__global__ void __launch_bounds__(kThreads)
    pack_scales_kernel(Sizes s, const void* scales, const void* zeros, void* to) {
  const int64_t index = thread_index(), n = index / s.groups, group = index % s.groups;
  if (n >= tiles_n(s.n) * kTileN) return;
  const bool inside = n < s.n;
  store_float(to, scale_offset(n, group, s.groups, s.parameters, 0), s.scale_dtype,
              inside ? load_float(scales, index, s.scale_dtype) : 0.0f);
  if (s.parameters == 1) return;
  store_float(to, scale_offset(n, group, s.groups, s.parameters, 1), s.scale_dtype,
              inside ? load_float(zeros, index, s.scale_dtype) : kSymmetricZero);
}

__global__ void __launch_bounds__(kThreads) unpack_weight_kernel(Sizes s, const uint8_t* weight, uint8_t* q) {
  const int64_t index = thread_index(), n = index / s.k, k = index % s.k;
  if (n >= s.n) return;
  q[index] = weight[weight_offset(n, k, s.k_tiles)] >> tile_shift(static_cast<int>(n % kTileN)) & 15;
}

__global__ void __launch_bounds__(kThreads) unpack_scales_kernel(Sizes s, const void* from, void* scales, void* zeros) {
  const int64_t index = thread_index(), n = index / s.groups, group = index % s.groups;
  if (n >= s.n) return;
  store_float(scales, index, s.scale_dtype,
              load_float(from, scale_offset(n, group, s.groups, s.parameters, 0), s.scale_dtype));
  const float zero = s.parameters == 1
                         ? kSymmetricZero
                         : load_float(from, scale_offset(n, group, s.groups, s.parameters, 1), s.scale_dtype);
  store_float(zeros, index, s.scale_dtype, zero);
}

// One thread per eight adjacent columns of rows g and g + 8: the four lanes' words that hold them are 16 bytes apart.
__global__ void __launch_bounds__(kThreads)
    dequantize_kernel(Sizes s, const uint8_t* weight, const void* scales, DType out_dtype, void* out) {
  const int64_t index = thread_index();
  const int chunk = static_cast<int>(index % 8);
  const int64_t rest = index / 8, k_tile = rest % s.k_tiles, row_pair = rest / s.k_tiles;
  const int64_t tile_row = row_pair / 8;
  const int64_t first_row = tile_row * kTileN + row_pair % 8, first_column = k_tile * kTileK + chunk * 8;
  if (tile_row >= tiles_n(s.n) || first_column >= s.k) return;

  const uint8_t* tile = weight + (tile_row * s.k_tiles + k_tile) * kTileBytes;
  uint8_t bytes[8];
#pragma unroll
  for (int column = 0; column < 8; ++column) {
    bytes[column] = tile[tile_byte(static_cast<int>(row_pair % 8), chunk * 8 + column)];
  }
  const int64_t group = first_column / s.group_size;
  const bool one_group = (first_column + 7) / s.group_size == group;
  for (int high = 0; high < 2; ++high) {
    const int64_t n = first_row + 8 * high;
    if (n >= s.n) return;
    float value[8];
    float scale = 0, zero = kSymmetricZero;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i == 0 || !one_group) {
        const int64_t g = min((first_column + i) / s.group_size, s.groups - 1);
        scale = load_float(scales, scale_offset(n, g, s.groups, s.parameters, 0), s.scale_dtype);
        if (s.parameters == 2) zero = load_float(scales, scale_offset(n, g, s.groups, 2, 1), s.scale_dtype);
      }
      value[i] = (static_cast<float>(bytes[i] >> (4 * high) & 15) - zero) * scale;
    }
    const int64_t at = n * s.k + first_column;
    if (s.k % 4 == 0 && first_column + 8 <= s.k) {
      store_float4(out, at, out_dtype, {value[0], value[1], value[2], value[3]});
      store_float4(out, at + 4, out_dtype, {value[4], value[5], value[6], value[7]});
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (first_column + i < s.k) store_float(out, at + i, out_dtype, value[i]);
      }
    }
  }
}

}  // namespace int4_kernels

Status pack(const Weight& shape, const Unpacked& from, uint8_t* weight, void* scales, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Sizes s = sizes_of(shape);
  pack_weight_kernel<<<blocks(weight_bytes(s.n, s.k)), kThreads, 0, stream>>>(s, from.q, weight);
  if (Status status = launch_status("launching pack_weight_kernel"); !status.ok()) return status;
  pack_scales_kernel<<<blocks(tiles_n(s.n) * kTileN * s.groups), kThreads, 0, stream>>>(s, from.scales, from.zeros,
                                                                                        scales);
  return launch_status("launching pack_scales_kernel");
}

Status unpack(const Weight& shape, const uint8_t* weight, const void* scales, const Unpacked& to, void* stream_handle) {
  const cudaStream_t stream = static_cast<cudaStream_t>(stream_handle);
  const Sizes s = sizes_of(shape);
  unpack_weight_kernel<<<blocks(s.n * s.k), kThreads, 0, stream>>>(s, weight, to.q);
  if (Status status = launch_status("launching unpack_weight_kernel"); !status.ok()) return status;
  unpack_scales_kernel<<<blocks(s.n * s.groups), kThreads, 0, stream>>>(s, scales, to.scales, to.zeros);
  return launch_status("launching unpack_scales_kernel");
}

Status dequantize(const Weight& shape, const uint8_t* weight, const void* scales, DType out_dtype, void* out,
                  void* stream_handle) {
  const Sizes s = sizes_of(shape);
  const int64_t threads = tiles_n(s.n) * 8 * s.k_tiles * 8;
  dequantize_kernel<<<blocks(threads), kThreads, 0, static_cast<cudaStream_t>(stream_handle)>>>(s, weight, scales,
                                                                                                out_dtype, out);
  return launch_status("launching dequantize_kernel");
}

}  // namespace qao::int4
