// MMAs of mainloop_smem_x.cuh for int4 weights: n-tiles of a K-step times x in shared memory.
//
// MMA columns are tokens, or pairs of a token and one of `groups` groups of a K-step: x is zero in the columns of other
// groups. So a column has one scale, and small groups cost no more instructions than large ones.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/kernels.h"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny::smem {

template <typename Tile, typename T, int groups, bool zeros, DType dtype>
class Product {
 public:
  static constexpr int kR = Tile::kTilesN;
  static constexpr bool kFp4 = false;
  using Sums = float[kR][4];

  __device__ __forceinline__ Product(const SmemXParams& d, uint32_t shared)
      : tokens_(d.tokens),
        x_(ptx::opaque(shared + min(token(lane() % 8), d.tokens - 1) * kTokenBytes + lane() / 8 * 16)),
        zeros_(shared + d.zeros_offset),
        parameters_(ptx::opaque(kR * kStepBytes + group(lane() % 4 * 2) * kGroupBytes + lane() / 4 * kSize)) {}

  // Accumulates one K-step. n-tiles and tokens past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t step_x, Sums& sum) const {
    const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};  // in the format of the bytes of W
    float x_sum[4] = {};
    float product[kR][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // of k-steps of 16 columns
      uint32_t b[4];
      const bool own = groups == 1 || pair * groups / 4 == group(lane() % 8);
      ptx::ldmatrix_x4(b, own ? x_ + step_x + pair * 64 : zeros_);
      Half<T>::mma(x_sum, ones, b[0], b[1]);
      Half<T>::mma(x_sum, ones, b[2], b[3]);
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        const uint2 two =
            ptx::load_shared_8(stage + lane() * 16 + i * kStepBytes + pair / 2 * kTileBytes + pair % 2 * 8);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          uint32_t a[4];
          make_operand(s == 0 ? two.x : two.y, a);
          Half<T>::mma(product[i], a, b[2 * s], b[2 * s + 1]);
        }
      }
    }
// Apply scales and zero points
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      const uint32_t from = stage + parameters_ + i * groups * kGroupBytes;
      const auto parameter = [&](int which) { return load_shared_float<dtype>(from + which * 8 * kSize); };
      const float scale[2] = {parameter(0), parameter(1)};
      const float zero[2] = {zeros ? parameter(2) : kSymmetricZero, zeros ? parameter(3) : kSymmetricZero};
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float low = product[i][e], both = product[i][e + 2], xs = x_sum[e];
        sum[i][e] += scale[0] * (low - zero[0] * xs);
        sum[i][e + 2] += scale[1] * (both - low - 16 * zero[1] * xs);
      }
    }
  }

  // Calls store(token, row within the n-tiles, value) for this lane's sums.
  template <typename Store>
  __device__ __forceinline__ void give(const Sums& sum, const Store& store) const {
    constexpr float kLow = kUnitOf<T>, kHigh = kLow / 16;
    const int g = lane() / 4, t = lane() % 4, first = token(t * 2);
    if constexpr (groups == 1) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (first + e >= tokens_) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          store(first + e, i * kTileN + g, sum[i][e] * kLow);
          store(first + e, i * kTileN + g + 8, sum[i][e + 2] * kHigh);
        }
      }
    } else {
      // Adds the groups held by neighboring lanes: two lanes keep rows g and two keep rows g + 8. With four groups each
      // keeps one token.
      const float unit = t < 2 ? kLow : kHigh;
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        float value[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) value[e] = exchange(t < 2, sum[i][e], sum[i][e + 2], 2) * unit;
        if constexpr (groups == 4) value[0] = exchange(t % 2 == 0, value[0], value[1], 1);
#pragma unroll
        for (int e = 0; e < (groups == 4 ? 1 : 2); ++e) {
          const int of = groups == 4 ? t % 2 : first + e;
          if (of < tokens_) store(of, i * kTileN + t / 2 * 8 + g, value[e]);
        }
      }
    }
  }

 private:
  static constexpr int kSize = size_of(dtype), kGroupBytes = (zeros ? 2 : 1) * kTileN * kSize;
  static constexpr int kTokens = 8 / groups;  // of the MMA columns
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int group(int column) { return column / kTokens; }
  static __device__ __forceinline__ int token(int column) { return column % kTokens; }

  // Keeps one of two values, adds the partner lane's copy of it, and gives that lane the other value.
  static __device__ __forceinline__ float exchange(bool first, float a, float b, int distance) {
    return (first ? a : b) + __shfl_xor_sync(kAllLanes, first ? b : a, distance);
  }

  const int tokens_;
  const uint32_t x_, zeros_, parameters_;
};

}  // namespace qao::gemm::sm90_skinny::smem
