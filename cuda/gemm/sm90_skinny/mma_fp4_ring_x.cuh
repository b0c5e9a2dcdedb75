// mainloop_ring_x.cuh for an fp4 weight (layout/fp4.h).
// Codes become small bfloat16 numbers, so rows g and g + 8 need no separation and there are no zero points. Each of the
// four or eight groups of a K-step is accumulated separately. Row divisors are applied to the sums.
#pragma once

#include "gemm/sm90_skinny/dequant_fp4.cuh"
#include "gemm/sm90_skinny/mainloop_ring_x.cuh"

namespace qao::gemm::sm90_skinny::ring_x {

// `groups` per K-step: 4 for MXFP4, 8 for NVFP4.
template <typename Tile, int groups>
struct Fp4Ring : Ring<Tile, groups, false, DType::kBFloat16, Format::kFp4> {
  using Base = Ring<Tile, groups, false, DType::kBFloat16, Format::kFp4>;
  using Base::Base, Base::kR, Base::kTM, Base::d, Base::lane;
  using typename Base::Sums, typename Base::Units, typename Base::X;
  static constexpr int kTileBytesOfScales = groups * kTileN * 2;

  // Offset in a stage where ldmatrix reads the scales. Transposed, rows g and g + 8 of four groups are neighbors.
  __device__ __forceinline__ uint32_t parameters() const { return d.scale_offset + lane / 8 * 32 + lane % 2 * 16; }

  // Accumulates one K-step, as Ring::multiply.
  __device__ __forceinline__ void multiply(uint32_t stage, const Units& units, uint32_t parameters, Sums& sum) const {
    // Load x
    X b;
    this->load_x(stage + d.x_offset, units, b);
    constexpr int kSteps = 8 / groups;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      // Load scales and weights of an n-tile
      uint32_t scales[groups];
#pragma unroll
      for (int first = 0; first < groups; first += 4) {
        ptx::ldmatrix_x4_transposed(reinterpret_cast<uint32_t (&)[4]>(scales[first]),
                                    stage + parameters + i * kTileBytesOfScales + first * 32);
      }
      uint32_t words[8];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 four = ptx::load_shared_16(stage + lane * 16 + i * kStepBytes + half * kTileBytes);
        words[4 * half] = four.x, words[4 * half + 1] = four.y;
        words[4 * half + 2] = four.z, words[4 * half + 3] = four.w;
      }
// Convert W, issue the MMAs and apply scales, group by group
#pragma unroll
      for (int group = 0; group < groups; ++group) {
        float product[kTM][4] = {};
#pragma unroll
        for (int step = group * kSteps; step < (group + 1) * kSteps; ++step) {
          uint32_t a[4];
          small_pairs(words[step], a);
#pragma unroll
          for (int j = 0; j < kTM; ++j) Half<T>::mma(product[j], a, b[step][j][0], b[step][j][1]);
        }
        const float scale[2] = {Half<T>::low(scales[group]), Half<T>::high(scales[group])};
#pragma unroll
        for (int j = 0; j < kTM; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[i][j][e] += scale[e / 2] * product[j][e];
        }
      }
    }
  }
};

}  // namespace qao::gemm::sm90_skinny::ring_x
