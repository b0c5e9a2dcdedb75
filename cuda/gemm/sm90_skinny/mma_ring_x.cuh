// MMA policy of ring_x.cuh for int4 and fp4 weights.
//
// Four instructions convert eight nibbles to operands: a byte in the low half of a bfloat16 is a subnormal number of
// that value times 2^-133, exactly. So row g of the operand is q[g], row g + 8 is q[g] + 16 q[g + 8], and the float32
// sums are separated afterwards. x is scaled by 2^100 so that products do not underflow. Zero points are also
// subtracted from the sums, using the sum of x over each group, which an MMA with ones computes. Values that overflow,
// or were not finite to begin with, are recomputed by `exact`.
//
// MMA columns are tokens. Where a K-step has several groups and columns are free, they are (token, group) pairs: x is
// zero in the columns of other groups. A column then has one scale, and groups need no separate sums.
//
// fp4 codes (layout/fp4.h) become small bfloat16 numbers, so rows g and g + 8 need no separation and there are no zero
// points. Each of the four (MXFP4) or eight groups (NVFP4) of a K-step is accumulated separately.
#pragma once

#include <cuda_bf16.h>

#include "common/mma.cuh"
#include "gemm/sm90_skinny/epilogue.cuh"
#include "gemm/sm90_skinny/params.h"

namespace qao::gemm::sm90_skinny::ring_x {

using T = __nv_bfloat16;

// Offset of a 16-byte chunk in the rows of x of a stage. The chunks of a token's 256 bytes are swizzled against bank
// conflicts.
__device__ __forceinline__ uint32_t x_offset(int row, int chunk) {
  return row * kStepColumns * 2 + ((chunk ^ (row & 7)) << 4);
}

// `groups` is the number of groups per K-step that are accumulated separately, `dtype` that of the scales and zeros.
template <typename Tile_, int groups, bool zeros, DType dtype, Format weight = Format::kInt4>
class Mma {
 public:
  using Tile = Tile_;
  static constexpr int kR = Tile::kTilesN, kTM = Tile::kTokens / 8;
  static constexpr bool kFp4 = weight == Format::kFp4;
  static constexpr bool kPairs = kTM == 1 && !kFp4;  // columns may be (token, group) pairs
  using Sums = float[kR][kTM][4];

  __device__ __forceinline__ Mma(const RingXParams& cut, int tokens) : d(cut), tokens_(tokens) {
#pragma unroll
    for (int quarter = 0; quarter < 4; ++quarter) {
      const int columns = kPairs ? d.columns_of_token : 1;
      const bool mine = columns == 1 || quarter * columns / 4 == column_group(lane() / 4);
      units_[quarter] = mine ? kScaleX : 0;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) x_[i] = ptx::opaque(x_at(i));
    // fp4: ldmatrix reads the scales. Transposed, rows g and g + 8 of four groups are neighbors.
    parameters_ =
        ptx::opaque(d.scale_offset + (kFp4 ? lane() / 8 * 32 + lane() % 2 * 16
                                           : column_group(lane() % 4 * 2) * kGroupBytes + lane() / 4 * kSize));
  }

  // Accumulates one K-step. n-tiles past the end are multiplied as well; their sums are discarded.
  __device__ __forceinline__ void multiply(uint32_t stage, int, Sums& sum) const {
    X b;
    // Load x and sum it over each group
    load_x(stage + d.x_offset, b);
    constexpr int kSteps = 8 / groups, kTogether = kR % 2 == 0 && !kFp4 ? 2 : 1;
    float x_sum[groups][kTM][4] = {};
    if constexpr (!kFp4) {
#pragma unroll
      for (int step = 0; step < 8; ++step) {
        const uint32_t ones[4] = {0x00010001, 0x00010001, 0x00010001, 0x00010001};
#pragma unroll
        for (int j = 0; j < kTM; ++j) Half<T>::mma(x_sum[step / kSteps][j], ones, b[step][j][0], b[step][j][1]);
      }
    }
    const uint32_t words = stage + lane() * 16;
    const uint32_t tile_parameters = (kPairs ? d.groups_of_step : groups) * kGroupBytes;
#pragma unroll
    for (int first = 0; first < kR; first += kTogether) {
      // Load the weights
      uint32_t pairs[groups];  // fp4: scales of rows g and g + 8
      if constexpr (kFp4) {
#pragma unroll
        for (int group = 0; group < groups; group += 4) {
          ptx::ldmatrix_x4_transposed(reinterpret_cast<uint32_t (&)[4]>(pairs[group]),
                                      stage + parameters_ + first * tile_parameters + group * 32);
        }
      }
      uint32_t word[kTogether][8];
#pragma unroll
      for (int i = 0; i < kTogether; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 four = ptx::load_shared_16(words + (first + i) * kStepBytes + half * kTileBytes);
          word[i][4 * half] = four.x, word[i][4 * half + 1] = four.y;
          word[i][4 * half + 2] = four.z, word[i][4 * half + 3] = four.w;
        }
      }
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        float scale[kTogether][2], zero[kTogether][2];  // of rows g and g + 8
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
          if constexpr (kFp4) continue;
          const uint32_t from = stage + parameters_ + (first + i) * tile_parameters + group * kGroupBytes;
#pragma unroll
          for (int high = 0; high < 2; ++high) {
            scale[i][high] = load_shared_float<dtype>(from + high * 8 * kSize);
            zero[i][high] = zeros ? load_shared_float<dtype>(from + (kTileN + high * 8) * kSize) : kSymmetricZero;
          }
        }
        // Convert W and issue the MMAs
        float product[kTogether][kTM][4] = {};
#pragma unroll
        for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
#pragma unroll
          for (int i = 0; i < kTogether; ++i) {
            uint32_t a[4];
            make_operand<kFp4>(word[i][step], a);
#pragma unroll
            for (int j = 0; j < kTM; ++j) Half<T>::mma(product[i][j], a, b[step][j][0], b[step][j][1]);
          }
        }
        // Apply scales and zero points
        if constexpr (kFp4) scale[0][0] = Half<T>::low(pairs[group]), scale[0][1] = Half<T>::high(pairs[group]);
#pragma unroll
        for (int i = 0; i < kTogether; ++i) {
#pragma unroll
          for (int j = 0; j < kTM; ++j) {
            if constexpr (kFp4) {
#pragma unroll
              for (int e = 0; e < 4; ++e) sum[first][j][e] += scale[0][e / 2] * product[0][j][e];
            } else {
              promote(product[i][j], x_sum[group][j], scale[i], zero[i], sum[first + i][j]);
            }
          }
        }
      }
    }
  }

  // Calls store(token, column of the token, row of the lane, row of the n-tile, value) for this lane's sums. The rows
  // are added.
  template <typename Store>
  __device__ __forceinline__ void give(const Sums& sum, const Store& store) const {
    constexpr float kLow = kFp4 ? kFp4Unit : kUnit, kHigh = kFp4 ? kFp4Unit : kUnit / 16;
    const int column = lane() % 4 * 2, row = lane() / 4;
#pragma unroll
    for (int j = 0; j < kTM; ++j) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = column_token(column) + j * 8 + e;
        if (token >= tokens_) continue;
#pragma unroll
        for (int i = 0; i < kR; ++i) {
          store(token, column_group(column), row, i * kTileN, sum[i][j][e] * kLow);
          store(token, column_group(column), row, i * kTileN + 8, sum[i][j][e + 2] * kHigh);
        }
      }
    }
  }

 private:
  static constexpr int kSize = size_of(dtype), kGroupBytes = (zeros ? 2 : 1) * kTileN * kSize;
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // The group within the K-step and the token of an MMA column.
  __device__ __forceinline__ int column_group(int column) const { return kPairs ? column >> d.token_shift : 0; }
  __device__ __forceinline__ int column_token(int column) const {
    return kPairs ? column & ((1 << d.token_shift) - 1) : column;
  }

  using X = uint32_t[8][kTM][2];                   // MMA operands of eight k-steps of 16
  static constexpr int kLoads = kTM == 1 ? 4 : 8;  // ldmatrix of four matrices each
  static_assert(kTM <= 2);
  // Where this lane reads x in a stage. Tokens past the end read the last one.
  __device__ __forceinline__ uint32_t x_at(int load) const {
    const int last = tokens_ - 1;
    if constexpr (kTM == 1) return x_offset(min(column_token(lane() % 8), last), 4 * load + lane() / 8);
    return x_offset(min(lane() / 16 * 8 + lane() % 8, last), 2 * load + lane() / 8 % 2);
  }
  __device__ __forceinline__ void load_x(uint32_t x, X& b) const {
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      uint32_t four[4];
      ptx::ldmatrix_x4(four, x + x_[i]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int step = kTM == 1 ? 2 * i + j / 2 : i;
        b[step][kTM == 1 ? 0 : j / 2][j % 2] = scale_x(four[j], kPairs ? units_[i] : kScaleX);
      }
    }
  }

  const RingXParams& d;
  const int tokens_;
  uint32_t units_[4];  // factors of this lane's x in the quarters of a K-step: zero outside its column's group
  uint32_t parameters_, x_[kLoads];
};

// `groups` per K-step: 4 for MXFP4, 8 for NVFP4.
template <typename Tile, int groups>
using Fp4Mma = Mma<Tile, groups, false, DType::kBFloat16, Format::kFp4>;

}  // namespace qao::gemm::sm90_skinny::ring_x
