// Operand conversion and epilogue shared by the skinny-GEMM kernels.
// Namespaces name where x lives: `ring_x` streams it through the ring (ring_x.cuh), `smem` keeps it in shared memory
// (smem_x.cuh), `tma_x` loads it there with TMA (tma_x.cuh).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/convert.cuh"
#include "common/fp4.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"
#include "layout/fp4.h"
#include "layout/int4.h"

namespace qao::gemm::sm90_skinny {

constexpr uint32_t kAllLanes = 0xFFFFFFFFu;
// Factor that undoes reading bytes of W as subnormal numbers. bfloat16 x is scaled by 2^100 beforehand.
template <typename T>
constexpr float kUnitOf = 0x1p33f;
template <>
constexpr float kUnitOf<__half> = 0x1p24f;
constexpr float kUnit = kUnitOf<__nv_bfloat16>;
constexpr float kFp4Unit = 0x1p26f;  // for codes placed by common/fp4.cuh

constexpr uint32_t kScaleX = 0x71807180;  // 2^100
__device__ __forceinline__ uint32_t scale_x(uint32_t pair, uint32_t by = kScaleX) {
  return Half<__nv_bfloat16>::multiply_add(pair, by, 0x80008000);
}

// Converts a word to four pairs, as fp4::small_pair(). One integer multiplication moves the magnitude and the sign of a
// code at once, since they do not overlap. That takes fewer instructions, and fewer of them on the logic pipe.
__device__ __forceinline__ void small_pairs(uint32_t word, uint32_t (&pairs)[4]) {
  constexpr int kShift = fp4::Place<__nv_bfloat16>::kShift;
  constexpr uint32_t kBits = 0x80008000u | 0x00070007u << kShift;
  constexpr uint32_t kFirst = 1u << kShift | 1u << 12, kSecond = kFirst >> 4;
  const uint32_t rest = word >> 8;
  pairs[0] = (word & 0x000F000Fu) * kFirst & kBits, pairs[1] = (word & 0x00F000F0u) * kSecond & kBits;
  pairs[2] = (rest & 0x000F000Fu) * kFirst & kBits, pairs[3] = (rest & 0x00F000F0u) * kSecond & kBits;
}

// Converts a word of packed weights to the 16-row MMA operand: fp4 codes as small numbers, bytes of int4 as subnormal
// numbers (see mma_ring_x.cuh).
template <bool fp4>
__device__ __forceinline__ void make_operand(uint32_t word, uint32_t (&a)[4]) {
  if constexpr (fp4) return small_pairs(word, a);
  const uint32_t odd = __byte_perm(word, 0, 0x4341);
  a[0] = word & 0x000F000F, a[1] = word & 0x00FF00FF, a[2] = odd & 0x000F000F, a[3] = odd;
}

// Promotes the product of a group of int4 W: sum += scale (product - zero point * sum of x). `product` has tokens 0 and
// 1 of row g, then of row g + 8, where it is that of q[g] + 16 q[g + 8].
template <int at_least_two>
__device__ __forceinline__ void promote(const float (&product)[4], const float (&x_sum)[at_least_two],
                                        const float (&scale)[2], const float (&zero)[2], float (&sum)[4]) {
#pragma unroll
  for (int e = 0; e < 2; ++e) {
    const float low = product[e], both = product[e + 2];
    sum[e] += scale[0] * (low - zero[0] * x_sum[e]);
    sum[e + 2] += scale[1] * (both - low - zero[1] * (16 * x_sum[e]));
  }
}

// Adds to `value` the partial sums of `slices`, `distance` bytes apart from shared address `from`, in a fixed order.
template <int slices>
__device__ __forceinline__ void add_slices(uint32_t from, int distance, float (&value)[4]) {
#pragma unroll
  for (int s = 0; s < slices; ++s) {
    const uint4 part = ptx::load_shared_16(from + s * distance);
    value[0] += __uint_as_float(part.x), value[1] += __uint_as_float(part.y);
    value[2] += __uint_as_float(part.z), value[3] += __uint_as_float(part.w);
  }
}

// Element `k` of token `token` of the original x.
template <typename T>
struct GivenX {
  const Params& p;
  int token;
  __device__ __forceinline__ float operator()(int k) const {
    return load_float(p.x, token * p.x_stride + k, Half<T>::kDType);
  }
};

__device__ __forceinline__ float code_value(int code) {
  return __half2float(__ushort_as_half(static_cast<unsigned short>((code & 7) << 9 | (code & 8) << 12))) * 0x1p14f;
}
// Divides the sums of rows n .. n + 3 by their row divisors (NVFP4 weights).
__device__ __forceinline__ void divide_rows(const Params& p, const uint8_t* scales, int n, float (&value)[4]) {
  using Bfloat16 = Half<__nv_bfloat16>;
  if (!p.divided) return;
  const int64_t at = int4::scale_offset(n, p.groups - fp4::kRowParts, p.groups, 1, 0);
  float divisor[4] = {};
#pragma unroll
  for (int part = 0; part < fp4::kRowParts; ++part) {
    const uint2 of = *reinterpret_cast<const uint2*>(scales + (at + part * kTileN) * 2);
    divisor[0] += Bfloat16::low(of.x), divisor[1] += Bfloat16::high(of.x);
    divisor[2] += Bfloat16::low(of.y), divisor[3] += Bfloat16::high(of.y);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) value[e] /= divisor[e];
}

// Recomputes four rows of a token in plain float32, by one warp. `X` reads a token of x.
template <typename X>
__device__ __noinline__ float4 exact(const Params& p, const Partition& d, const uint8_t* weight, const uint8_t* scales,
                                     int n, int token) {
  const int lane = threadIdx.x % 32;
  const X values{p, token};
  float sum[4] = {};
  for (int k = lane; k < p.k; k += 32) {
    const float x = values(k);
    const int group =
        (k / kStepColumns * d.groups_of_step + k % kStepColumns * d.groups_of_step / kStepColumns) >> d.group_shift;
    const int parameters = p.group_bytes / (kTileN * size_of(p.scale_dtype));
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int q = weight[int4::weight_offset(n + e, k, p.k_tiles)] >> int4::tile_shift((n + e) % kTileN) & 15;
      const auto read = [&](int parameter) {
        return load_float(scales, int4::scale_offset(n + e, group, p.groups, parameters, parameter), p.scale_dtype);
      };
      sum[e] += (p.fp4 ? code_value(q) : q - (d.zeros ? read(1) : kSymmetricZero)) * read(0) * x;
    }
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], distance);
  }
  return {sum[0], sum[1], sum[2], sum[3]};
}

// The whole warp recomputes each lane's value that is not finite, with the lane's weight. A separate function keeps
// this rare case out of the instruction cache.
template <typename X>
__device__ __noinline__ float4 repaired(const Params& p, const Partition& d, const uint8_t* weight,
                                        const uint8_t* scales, int n, int token, uint32_t lanes, float4 value) {
  for (; lanes != 0; lanes &= lanes - 1) {
    const int from = __ffs(lanes) - 1;
    const auto of_lane = [&](const uint8_t* pointer) {
      return reinterpret_cast<const uint8_t*>(__shfl_sync(kAllLanes, reinterpret_cast<uint64_t>(pointer), from));
    };
    const float4 again = exact<X>(p, d, of_lane(weight), of_lane(scales), __shfl_sync(kAllLanes, n, from),
                                  __shfl_sync(kAllLanes, token, from));
    if (static_cast<int>(threadIdx.x % 32) == from) value = again;
  }
  return value;
}
template <typename X>
__device__ __forceinline__ void repair(const Params& p, const Partition& d, const uint8_t* weight,
                                       const uint8_t* scales, int n, int token, float (&value)[4]) {
  const uint32_t wrong = __ballot_sync(kAllLanes, !isfinite(value[0] + value[1] + value[2] + value[3]));
  if (wrong == 0) return;
  const float4 v = repaired<X>(p, d, weight, scales, n, token, wrong, {value[0], value[1], value[2], value[3]});
  value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}
template <typename X = GivenX<__nv_bfloat16>>
__device__ __forceinline__ void repair(const Params& p, const Partition& d, int n, int token, float (&value)[4]) {
  repair<X>(p, d, p.weight, p.scales, n, token, value);
}

inline __device__ __noinline__ float4 biased(const void* bias, DType dtype, int n, int rows, float4 value) {
  float by[4] = {};
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    if (n + e < rows) by[e] = load_float(bias, n + e, dtype);
  }
  return {value.x + by[0], value.y + by[1], value.z + by[2], value.w + by[3]};
}
__device__ __forceinline__ void add_bias(const void* bias, DType dtype, int rows, int n, float (&value)[4]) {
  if (bias == nullptr) return;
  const float4 v = biased(bias, dtype, n, rows, {value[0], value[1], value[2], value[3]});
  value[0] = v.x, value[1] = v.y, value[2] = v.z, value[3] = v.w;
}

__device__ __forceinline__ void add_bias(const Params& p, const void* bias, int n, float (&value)[4]) {
  add_bias(bias, p.bias_dtype, p.n, n, value);
}

// Stores to y [m, outputs] of type T. Rows past the end are skipped.
template <typename T = __nv_bfloat16>
__device__ __forceinline__ void store_rows(void* y, int outputs, int n, int64_t token, const float (&value)[4]) {
  const int64_t at = token * outputs + n;
  if (outputs % 4 == 0) {
    if (n < outputs) store_float4(y, at, Half<T>::kDType, value);
  } else {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      if (n + e < outputs) store_float(y, at + e, Half<T>::kDType, value[e]);
    }
  }
}
// Adds the bias, then stores.
template <typename T = __nv_bfloat16>
__device__ __forceinline__ void store_rows(const Params& p, int n, int token, float (&value)[4]) {
  add_bias(p, p.bias, n, value);
  store_rows<T>(p.y, p.n, n, token, value);
}

}  // namespace qao::gemm::sm90_skinny
