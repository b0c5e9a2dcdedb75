// MMA policy of smem_x.cuh for int4 and fp4 weights: n-tiles of a K-step times x in shared memory.
//
// MMA columns are tokens, or pairs of a token and one of `groups` groups of a K-step: x is zero in the columns of other
// groups. So a column has one scale, and small groups cost no more instructions than large ones. The eight groups of a
// K-step of NVFP4 leave room for one token.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "common/ptx.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny::smem {

template <typename Tile_, typename T_, int groups, bool zeros, DType dtype, Format weight = Format::kInt4>
class Mma {
 public:
  using Tile = Tile_;
  using T = T_;
  static constexpr int kR = Tile::kTilesN;
  static constexpr bool kFp4 = weight == Format::kFp4;
  using Sums = float[kR][4];

  __device__ __forceinline__ Mma(const SmemXParams& d, uint32_t shared)
      : tokens_(d.tokens),
        step_bytes_(d.tokens * kTokenBytes),
        x_(ptx::opaque(shared + min(token(lane() % 8), d.tokens - 1) * kTokenBytes + lane() / 8 * 16)),
        zeros_(shared + d.zeros_offset),
        parameters_(ptx::opaque(kR * kStepBytes + group(lane() % 4 * 2) * kGroupBytes + lane() / 4 * kSize)) {}

  // Accumulates one K-step. n-tiles and tokens past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, int step, Sums& sum) const {
    const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};  // in the format of the bytes of W
    const uint32_t step_x = step * step_bytes_;
    float x_sum[4] = {};
    float product[kR][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // of k-steps of 16 columns; four lanes' addresses load each half
      uint32_t b[4];
      const int of_pair = groups == 8 ? 2 * pair + lane() / 16 : pair * groups / 4;
      const bool own = groups == 1 || of_pair == group(lane() % 8);
      ptx::ldmatrix_x4(b, own ? x_ + step_x + pair * 64 : zeros_);
      if constexpr (!kFp4) {
        Half<T>::mma(x_sum, ones, b[0], b[1]);
        Half<T>::mma(x_sum, ones, b[2], b[3]);
      }
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        const uint2 two =
            ptx::load_shared_8(stage + lane() * 16 + i * kStepBytes + pair / 2 * kTileBytes + pair % 2 * 8);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          uint32_t a[4];
          make_operand<kFp4>(s == 0 ? two.x : two.y, a);
          Half<T>::mma(product[i], a, b[2 * s], b[2 * s + 1]);
        }
      }
    }
    // Apply scales and zero points
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      const uint32_t from = stage + parameters_ + i * groups * kGroupBytes;
      const auto parameter = [&](int which) { return load_shared_float<dtype>(from + which * 8 * kSize); };
      if constexpr (kFp4) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {  // a lane's columns belong to one group, or to two neighboring ones
          sum[i][e] += parameter(e / 2 + (groups == 8 ? e % 2 * 2 : 0)) * product[i][e];
        }
      } else {
        const float scale[2] = {parameter(0), parameter(1)};
        const float zero[2] = {zeros ? parameter(2) : kSymmetricZero, zeros ? parameter(3) : kSymmetricZero};
        promote(product[i], x_sum, scale, zero, sum[i]);
      }
    }
  }

  // Calls store(token, column of the token, row of the lane, row of the n-tile, value) for this lane's sums. The rows
  // are added.
  template <typename Store>
  __device__ __forceinline__ void give(const Sums& sum, const Store& store) const {
    constexpr float kLow = kFp4 ? kFp4Unit : kUnitOf<T>, kHigh = kFp4 ? kFp4Unit : kLow / 16;
    const int g = lane() / 4, t = lane() % 4, first = token(t * 2);
    if constexpr (groups == 1) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (first + e >= tokens_) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          store(first + e, 0, g, i * kTileN, sum[i][e] * kLow);
          store(first + e, 0, g, i * kTileN + 8, sum[i][e + 2] * kHigh);
        }
      }
    } else {
      // Adds the groups held by neighboring lanes: two lanes keep rows g and two keep rows g + 8. With four groups each
      // keeps one token, with eight two lanes have the only one.
      const float unit = t < 2 ? kLow : kHigh;
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        float value[4] = {sum[i][0], sum[i][1], sum[i][2], sum[i][3]};
        if constexpr (groups == 8) value[0] += value[1], value[2] += value[3];
#pragma unroll
        for (int e = 0; e < (groups == 8 ? 1 : 2); ++e) value[e] = exchange(t < 2, value[e], value[e + 2], 2) * unit;
        if constexpr (groups == 4) value[0] = exchange(t % 2 == 0, value[0], value[1], 1);
        if constexpr (groups == 8) value[0] += __shfl_xor_sync(kAllLanes, value[0], 1);
#pragma unroll
        for (int e = 0; e < (groups == 2 ? 2 : 1); ++e) {
          const int of = groups == 2 ? first + e : t % 2;
          if (of < tokens_) store(of, 0, t / 2 * 8 + g, i * kTileN, value[e]);
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
  const uint32_t step_bytes_, x_, zeros_, parameters_;
};

}  // namespace qao::gemm::sm90_skinny::smem
