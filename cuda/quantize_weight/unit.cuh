// Register tile of a warp that quantizes to 4 bits: 16 rows x 128 columns.
// That is two tiles of the packed layout. Lane 4 g + t loads vectors t, 4 + t, 8 + t and 12 + t of eight columns of
// rows g and g + 8, keeps them in registers until the scales are known, and passes codes to the lanes that store them.
// So a quad holds all of a group of up to 128 columns.
#pragma once

#include "common/integers.h"
#include "common/ptx_half.cuh"
#include "layout/int4.h"
#include "quantize_weight/load.cuh"
#include "quantize_weight/params.h"

namespace qao::weight {

using quantize::kVector;
using quantize::Packed;

constexpr int kUnit = 2 * int4::kTileK;        // columns per warp
constexpr int kVectors = kUnit / kVector / 4;  // per row and lane
constexpr int kWarps = 4;                      // per CTA, if the warps of a launch cover W in order

struct Place {
  int64_t row_tile, first;  // the first column
};
__device__ __forceinline__ Place place_of_warp(const Params& p) {
  const uint32_t units = static_cast<uint32_t>((p.k + kUnit - 1) / kUnit);
  const uint32_t index = blockIdx.x * kWarps + threadIdx.x / 32;
  return {index / units, int64_t{index % units} * kUnit};
}
inline unsigned ctas_of(const Params& p) {
  return static_cast<unsigned>(ceil_div(int4::tiles_n(p.n) * ceil_div(p.k, kUnit), kWarps));
}

template <DType dtype>
struct Unit {
  Packed<dtype> vector[2][kVectors];  // rows g and g + 8
  int64_t first;                      // column of this lane's vector 0

  __device__ __forceinline__ void load(const Params& p, int64_t row, int64_t first_column) {
    first = first_column + threadIdx.x % 4 * kVector;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const char* from = static_cast<const char*>(p.weight) + (row + 8 * r) * p.stride * size_of(dtype);
      const int columns = row + 8 * r < p.n ? static_cast<int>(p.k) : 0;
      if (p.aligned) {
#pragma unroll
        for (int j = 0; j < kVectors; ++j) {
          vector[r][j].template load<true, true>(from, static_cast<int>(column(j)), columns);
        }
      } else {
#pragma unroll
        for (int j = 0; j < kVectors; ++j)
          vector[r][j] = load_slowly<dtype>(from, static_cast<int>(column(j)), columns);
      }
    }
  }
  __device__ __forceinline__ int64_t column(int j) const { return first + 4 * kVector * j; }

  // Stores both tiles to `q`. codes_of(r, j, word) computes the codes of a vector: word c has columns 2 c and 2 c + 1,
  // 16 bits each.
  template <typename CodesOf>
  __device__ __forceinline__ void store(const Params& p, int64_t row_tile, const CodesOf& codes_of) const {
    const int64_t k_tiles = int4::tiles_k(p.k), first_tile = first / int4::kTileK;
    const bool edge = first_tile * int4::kTileK + kUnit > p.k || (row_tile + 1) * int4::kTileN > p.n;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint32_t both[2][4];  // per vector t and 4 + t of the tile; 16 bits: row g in the low byte, row g + 8 above
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t code[2][4];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          codes_of(r, 2 * tile + half, code[r]);
          if (edge) cut(p, row_tile * int4::kTileN + threadIdx.x % 32 / 4 + 8 * r, 2 * tile + half, code[r]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c) both[half][c] = code[0][c] + 16 * code[1][c];
      }
      uint32_t word[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) word[c] = __byte_perm(both[0][c], both[1][c], 0x6420);
      transpose(word);
      if (first_tile + tile < k_tiles) {
        uint8_t* to = p.q + (row_tile * k_tiles + first_tile + tile) * int4::kTileBytes + threadIdx.x % 32 * 16;
        *reinterpret_cast<uint4*>(to) = {__byte_perm(word[0], word[1], 0x5140), __byte_perm(word[2], word[3], 0x5140),
                                         __byte_perm(word[0], word[1], 0x7362), __byte_perm(word[2], word[3], 0x7362)};
      }
    }
  }

 private:
  // Rows and columns past N and K hold 8.
  __device__ __forceinline__ void cut(const Params& p, int64_t n, int j, uint32_t (&code)[4]) const {
    const int64_t exist = n < p.n ? p.k - column(j) : 0;
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      if (2 * c >= exist) code[c] = int4::kSymmetricZero;
      if (2 * c + 1 >= exist) code[c] = (code[c] & 0xFFFF) | int4::kSymmetricZero << 16;
    }
  }

  // Transposes four words over four lanes: word c of lane t becomes word t of lane c.
  static __device__ __forceinline__ void transpose(uint32_t (&word)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
#pragma unroll
    for (int d = 0; d < 4; d += 2) {
      const uint32_t got = __shfl_xor_sync(~0u, odd ? word[d] : word[d + 1], 1);
      (odd ? word[d] : word[d + 1]) = got;
    }
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const uint32_t got = __shfl_xor_sync(~0u, upper ? word[e] : word[2 + e], 2);
      (upper ? word[e] : word[2 + e]) = got;
    }
  }
};

// The maximum and the negated minimum; NaN if any value is NaN.
template <DType dtype>
struct Extremes {
  static constexpr int kWords = dtype == DType::kFloat32 ? 2 : 1;
  uint32_t word[kWords];  // float32: one per word; otherwise 16 bits each

  // Over vector(j) for j in [0, count).
  template <int count, typename VectorAt>
  static __device__ __forceinline__ Extremes of(const VectorAt& vector) {
    Extremes result;
    if constexpr (dtype == DType::kFloat32) {
      float high = -INFINITY, below = -INFINITY;
#pragma unroll
      for (int j = 0; j < count; ++j) {
        float value[kVector];
        vector(j).unpack(value);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          high = ptx::max_or_nan(high, value[i]), below = ptx::max_or_nan(below, -value[i]);
        }
      }
      result.word[0] = __float_as_uint(high), result.word[1] = __float_as_uint(below);
    } else {
      uint32_t high = 0, low = 0;  // of even and odd columns
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const uint4 part = vector(j).part[0];
        const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          high = j + i == 0 ? words[i] : ptx::max_or_nan2<dtype>(high, words[i]);
          low = j + i == 0 ? words[i] : ptx::min_or_nan2<dtype>(low, words[i]);
        }
      }
      low ^= 0x80008000u;
      result.word[0] = ptx::max_or_nan2<dtype>(__byte_perm(high, low, 0x5410), __byte_perm(high, low, 0x7632));
    }
    return result;
  }

  __device__ __forceinline__ void add(const Extremes& other) {
    if constexpr (dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        word[i] = __float_as_uint(ptx::max_or_nan(__uint_as_float(word[i]), __uint_as_float(other.word[i])));
      }
    } else {
      word[0] = ptx::max_or_nan2<dtype>(word[0], other.word[0]);
    }
  }
  __device__ __forceinline__ Extremes of_lane_xor(int lane) const {
    Extremes other;
#pragma unroll
    for (int i = 0; i < kWords; ++i) other.word[i] = __shfl_xor_sync(~0u, word[i], lane);
    return other;
  }
  __device__ __forceinline__ float high() const { return get(0); }
  __device__ __forceinline__ float low() const { return -get(1); }

 private:
  __device__ __forceinline__ float get(int i) const {
    if constexpr (dtype == DType::kFloat32) return __uint_as_float(word[i]);
    const uint32_t bits = i ? word[0] >> 16 : word[0] & 0xFFFF;
    if constexpr (dtype == DType::kBFloat16) return __uint_as_float(bits << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  }
};

// Reduces over the lanes of a quad. Each of `count` extremes ends up in the lanes that owner_of() names, in the first
// kOwned<count> elements.
template <int count>
constexpr int kOwned = count > 4 ? count / 4 : 1;
template <int count>
QAO_HOST_DEVICE constexpr int owner_of(int e) {
  return e * 4 / count;
}
template <DType dtype, int count>
__device__ __forceinline__ void reduce_over_quad(Extremes<dtype> (&all)[count]) {
#pragma unroll
  for (int lane = 2, left = count; lane > 0; lane /= 2) {
    const bool upper = threadIdx.x & lane;
    if (left == 1) {
      all[0].add(all[0].of_lane_xor(lane));
      continue;
    }
    left /= 2;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const Extremes<dtype> mine = upper ? all[left + i] : all[i], theirs = upper ? all[i] : all[left + i];
      all[i] = mine, all[i].add(theirs.of_lane_xor(lane));
    }
  }
}

}  // namespace qao::weight
