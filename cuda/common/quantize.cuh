// Rounding of floats to int8 or e4m3, eight adjacent columns at a time: ranges, scales, values.
//
// Shared by quantization kernels and by GEMM kernels that quantize x, so that their bits are equal.
#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "common/convert.cuh"

namespace qao::quantize {

constexpr int kVector = 8;
constexpr float kSmallestMaximum = 0x1p-100f;  // below, the reciprocal of a scale would overflow
constexpr float kLargestFp8 = 448;

// Target format.
struct Target {
  bool fp8, symmetric;  // symmetric: zero point 0, always true for fp8
  int k;                // valid columns; q is 0 in others
};

// Eight values as stored in memory. Issue several loads before the first use, to keep loads in flight.
template <DType dtype>
struct Packed {
  static constexpr int kParts = size_of(dtype) / 2;
  uint4 part[kParts];

  // Loads data[column ..], zero from `columns` on. kFast: `columns` is a multiple of 8 and the address is 16-byte
  // aligned. kShared: other CTAs read it too.
  template <bool kFast, bool kShared = false>
  __device__ __forceinline__ void load(const void* data, int column, int columns) {
    if constexpr (kFast) {
      const uint4* from =
          reinterpret_cast<const uint4*>(static_cast<const char*>(data) + int64_t{column} * size_of(dtype));
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        part[i] = column >= columns ? uint4{} : kShared ? __ldg(from + i) : __ldcs(from + i);
      }
    } else {
      using Element = std::conditional_t<dtype == DType::kFloat32, uint32_t, uint16_t>;
      constexpr int kBits = 8 * sizeof(Element), kPerWord = 32 / kBits;
      uint32_t word[4 * kParts] = {};
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const Element element = column + i < columns ? static_cast<const Element*>(data)[column + i] : Element{0};
        word[i / kPerWord] |= static_cast<uint32_t>(element) << (i % kPerWord * kBits);
      }
#pragma unroll
      for (int i = 0; i < kParts; ++i) part[i] = {word[4 * i], word[4 * i + 1], word[4 * i + 2], word[4 * i + 3]};
    }
  }
  // Forces the compiler to unpack the vector again after this point instead of keeping unpacked values in registers.
  __device__ __forceinline__ void pin() {
#pragma unroll
    for (int i = 0; i < kParts; ++i) ptx::pin(part[i]);
  }
  // Rounds each sum to the dtype.
  __device__ __forceinline__ void add(const Packed& other) {
    const auto sum = [](uint32_t a, uint32_t b) {
      if constexpr (dtype == DType::kFloat32) {
        return __float_as_uint(__uint_as_float(a) + __uint_as_float(b));
      } else {
        using Pair = std::conditional_t<dtype == DType::kBFloat16, __nv_bfloat162, __half2>;
        const Pair pair = __hadd2_rn(*reinterpret_cast<const Pair*>(&a), *reinterpret_cast<const Pair*>(&b));
        return *reinterpret_cast<const uint32_t*>(&pair);
      }
    };
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const uint4 a = part[i], b = other.part[i];
      part[i] = {sum(a.x, b.x), sum(a.y, b.y), sum(a.z, b.z), sum(a.w, b.w)};
    }
  }
  __device__ __forceinline__ void pack(const float (&value)[kVector]) {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      uint32_t word[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (dtype == DType::kFloat32) {
          word[i] = __float_as_uint(value[4 * p + i]);
        } else if constexpr (dtype == DType::kBFloat16) {
          const __nv_bfloat162 pair = __floats2bfloat162_rn(value[2 * i], value[2 * i + 1]);
          word[i] = *reinterpret_cast<const uint32_t*>(&pair);
        } else {
          const __half2 pair = __floats2half2_rn(value[2 * i], value[2 * i + 1]);
          word[i] = *reinterpret_cast<const uint32_t*>(&pair);
        }
      }
      part[p] = {word[0], word[1], word[2], word[3]};
    }
  }
  // The reverse of load().
  template <bool kFast>
  __device__ __forceinline__ void store(void* data, int column, int columns) const {
    if constexpr (kFast) {
      uint4* to = reinterpret_cast<uint4*>(static_cast<char*>(data) + int64_t{column} * size_of(dtype));
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (column < columns) to[i] = part[i];
      }
    } else {
      using Element = std::conditional_t<dtype == DType::kFloat32, uint32_t, uint16_t>;
      constexpr int kBits = 8 * sizeof(Element), kPerWord = 32 / kBits;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint4& four = part[i / (4 * kPerWord)];
        const uint32_t words[4] = {four.x, four.y, four.z, four.w};
        if (column + i < columns) {
          static_cast<Element*>(data)[column + i] =
              static_cast<Element>(words[i / kPerWord % 4] >> (i % kPerWord * kBits));
        }
      }
    }
  }
  __device__ __forceinline__ void unpack(float (&value)[kVector]) const {
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t words[4] = {part[p].x, part[p].y, part[p].z, part[p].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (dtype == DType::kFloat32) {
          value[4 * p + i] = __uint_as_float(words[i]);
        } else if constexpr (dtype == DType::kBFloat16) {
          value[2 * i] = __uint_as_float(words[i] << 16);
          value[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
        } else {
          const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&words[i]));
          value[2 * i] = pair.x, value[2 * i + 1] = pair.y;
        }
      }
    }
  }
};

// Maximum and negated minimum of values and 0, as float bits. They are non-negative, so they compare as unsigned
// integers, with NaN above infinity.
struct Range {
  uint32_t high = 0, below = 0;

  // Only asymmetric q needs signs; otherwise `high` is the largest magnitude.
  __device__ __forceinline__ void add(const float (&value)[kVector], bool symmetric) {
    float largest = 0, smallest = 0;
    if (symmetric) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) largest = ptx::max_or_nan(largest, fabsf(value[i]));
    } else {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        largest = ptx::max_or_nan(largest, value[i]);
        smallest = ptx::max_or_nan(smallest, -value[i]);
      }
    }
    high = max(high, __float_as_uint(largest));
    below = max(below, __float_as_uint(smallest));
  }
  __device__ __forceinline__ void scale(float factor) {
    high = __float_as_uint(__uint_as_float(high) * factor);
    below = __float_as_uint(__uint_as_float(below) * factor);
  }
  __device__ __forceinline__ uint32_t largest() const { return max(high, below); }
};

// Parameters of the rounding.
struct Rounding {
  float inverse = 0, zero = 0;
  bool finite = true;  // else q is 0
};

// Scale for the largest magnitude with these bits.
__device__ __forceinline__ float scale_of(uint32_t largest, float steps) {
  return largest < 0x7F800000u ? __fdiv_rn(fmaxf(__uint_as_float(largest), kSmallestMaximum), steps) : NAN;
}
__device__ __forceinline__ Rounding rounding_of(float scale) { return {__frcp_rn(scale), 0, !isnan(scale)}; }

// Scale and rounding of a row with that range.
__device__ __forceinline__ Rounding rounding_of(const Range& range, const Target& target, float* scale) {
  *scale = scale_of(range.largest(), target.fp8 ? kLargestFp8 : 127.0f);
  if (!target.symmetric && range.largest() < 0x7F800000u) {
    *scale = fmaxf(__fadd_rn(__fdiv_rn(__uint_as_float(range.high), 255), __fdiv_rn(__uint_as_float(range.below), 255)),
                   kSmallestMaximum);
  }
  Rounding rounding = rounding_of(*scale);
  if (!target.symmetric && rounding.finite) {
    const float zero = rintf(__fadd_rn(-128, __fmul_rn(__uint_as_float(range.below), rounding.inverse)));
    rounding.zero = fminf(fmaxf(zero, -128.0f), 127.0f);
  }
  return rounding;
}

__device__ __forceinline__ uint16_t to_fp8_pair(float low, float high) {
#if __CUDA_ARCH__ >= 890
  return __nv_cvt_float2_to_fp8x2({low, high}, __NV_SATFINITE, __NV_E4M3);
#else
  uint32_t pair = 0;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t bits = __float_as_uint(i ? high : low), magnitude = bits & 0x7FFFFFFF;
    uint32_t code = (magnitude - 0x3C000000 + 0x7FFFF + (magnitude >> 20 & 1)) >> 20;
    // Subnormal: adding 2^14 aligns and rounds the mantissa.
    if (magnitude < 0x3C800000) code = __float_as_uint(__fadd_rn(__uint_as_float(magnitude), 0x1p14f)) - 0x46800000;
    if (magnitude >= 0x43E00000) code = 0x7E;  // 448 and more
    pair |= (magnitude > 0x7F800000 ? 0x7F : code | (bits >> 24 & 0x80)) << (8 * i);
  }
  return static_cast<uint16_t>(pair);
#endif
}

// Rounds eight values in column order. Columns from k on are 0 regardless of the zero point.
__device__ __forceinline__ uint2 round_vector(const Target& target, const Rounding& r, const float (&value)[kVector],
                                              int column) {
  uint32_t word[2];
  float t[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) t[i] = __fmul_rn(value[i], r.inverse);
  if (target.fp8) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      word[i] = to_fp8_pair(t[4 * i], t[4 * i + 1]) | uint32_t{to_fp8_pair(t[4 * i + 2], t[4 * i + 3])} << 16;
    }
  } else {
    // Adding 1.5 * 2^23 rounds a float to an integer; the low byte of the sum is its low byte.
    constexpr float kInteger = 0x1.8p23f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) t[i] = __fadd_rn(t[i], kInteger);
    if (!target.symmetric) {  // symmetric |q| exceeds 127 by a rounding error at most
#pragma unroll
      for (int i = 0; i < kVector; ++i) t[i] = fminf(fmaxf(__fadd_rn(t[i], r.zero), kInteger - 128), kInteger + 127);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint32_t bits[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) bits[e] = __float_as_uint(t[4 * i + e]);
      word[i] = __byte_perm(__byte_perm(bits[0], bits[1], 0x0040), __byte_perm(bits[2], bits[3], 0x0040), 0x5410);
    }
  }
  if (!r.finite) word[0] = word[1] = 0;
  if (column + kVector > target.k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int valid = target.k - column - 4 * i;
      if (valid < 4) word[i] = valid <= 0 ? 0 : word[i] & ((1u << (8 * valid)) - 1);
    }
  }
  return {word[0], word[1]};
}

// Order::kInt4Tiles: columns c and c + 8 of each 16 become adjacent. Two lanes exchange halves: lane i holds the vector
// after that of lane i - 1. Executed by all lanes of a warp.
__device__ __forceinline__ uint2 int4_tile_order(uint2 word) {
  const bool odd = threadIdx.x & 1;
  const uint32_t keep = odd ? word.y : word.x;
  const uint32_t other = __shfl_xor_sync(~0u, odd ? word.x : word.y, 1);
  const uint32_t first = odd ? other : keep, second = odd ? keep : other;
  return {__byte_perm(first, second, 0x5140), __byte_perm(first, second, 0x7362)};
}

__device__ __forceinline__ float sum_of(const Target& target, uint2 word) {
  if (!target.fp8) {
    return static_cast<float>(
        __dp4a(static_cast<int>(word.x), 0x01010101, __dp4a(static_cast<int>(word.y), 0x01010101, 0)));
  }
  float sum = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t pair = (i < 2 ? word.x : word.y) >> (16 * (i % 2));
    const __half2_raw both = __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(pair), __NV_E4M3);
    const float2 values = __half22float2(__half2(both));
    sum += values.x + values.y;
  }
  return sum;
}

// Sums over `lanes` adjacent lanes, a power of two. `count` sums at once hide latency.
template <typename T, int count>
__device__ __forceinline__ void sum_over_lanes(T (&sum)[count], int lanes) {
#pragma unroll
  for (int lane = 1; lane < 32; lane *= 2) {
    if (lane >= lanes) break;
#pragma unroll
    for (int i = 0; i < count; ++i) sum[i] += __shfl_xor_sync(~0u, sum[i], lane);
  }
}

// Sums over a row are accumulated as integers in these units, so that they are exact in any order.
__device__ __forceinline__ int64_t to_units(const Target& target, float vector_sum) {
  return __float2int_rn(target.fp8 ? vector_sum * 0x1p9f : vector_sum);
}
__device__ __forceinline__ float from_units(const Target& target, int64_t sum) {
  return __ll2float_rn(sum) * (target.fp8 ? 0x1p-9f : 1.0f);
}

}  // namespace qao::quantize
