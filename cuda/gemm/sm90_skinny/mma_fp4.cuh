// MMAs of mainloop_smem_x.cuh for an fp4 weight (layout/fp4.h), with operands as in mma_fp4_ring_x.cuh.
// As in mma_int4.cuh, MMA columns are (token, group) pairs: the eight groups of a K-step (NVFP4) leave room for
// one token, four (MXFP4) for two.
#pragma once

#include "gemm/sm90_skinny/dequant_fp4.cuh"
#include "gemm/sm90_skinny/mainloop_smem_x.cuh"

namespace qao::gemm::sm90_skinny::smem {

template <typename Tile, int groups>
class Fp4Product {
 public:
  using T = __nv_bfloat16;
  static constexpr int kR = Tile::kTilesN;
  static constexpr bool kFp4 = true;
  using Sums = float[kR][4];

  __device__ __forceinline__ Fp4Product(const SmemXParams& d, uint32_t shared)
      : tokens_(d.tokens),
        x_(ptx::opaque(shared + min(lane() % kTokens, d.tokens - 1) * kTokenBytes + lane() / 8 * 16)),
        zeros_(shared + d.zeros_offset),
        scales_(ptx::opaque(kR * kStepBytes + lane() % 4 * (2 / kTokens * kGroupBytes) + lane() / 4 * 2)) {}

  // Accumulates one K-step, as Product::multiply.
  __device__ __forceinline__ void multiply(uint32_t stage, uint32_t step_x, Sums& sum) const {
    float product[kR][4] = {};
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {  // of k-steps of 16 columns; four lanes' addresses load each half
      uint32_t b[4];
      const int group = groups == 8 ? 2 * pair + lane() / 16 : pair;
      ptx::ldmatrix_x4(b, group == lane() % 8 / kTokens ? x_ + step_x + pair * 64 : zeros_);
#pragma unroll
      for (int i = 0; i < kR; ++i) {
        const uint2 two =
            ptx::load_shared_8(stage + lane() * 16 + i * kStepBytes + pair / 2 * kTileBytes + pair % 2 * 8);
#pragma unroll
        for (int s = 0; s < 2; ++s) {
          uint32_t a[4];
          small_pairs(s == 0 ? two.x : two.y, a);
          Half<T>::mma(product[i], a, b[2 * s], b[2 * s + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kR; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {  // a lane's columns belong to one group, or to two neighboring ones
        const uint32_t from = stage + scales_ + i * groups * kGroupBytes + (groups == 8 ? e % 2 * kGroupBytes : 0);
        sum[i][e] += load_shared_float<DType::kBFloat16>(from + e / 2 * 16) * product[i][e];
      }
    }
  }

  // Calls store(token, row within the n-tiles, value) for this lane's sum: row g or g + 8 of one token.
  template <typename Store>
  __device__ __forceinline__ void give(const Sums& sum, const Store& store) const {
    const int g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int i = 0; i < kR; ++i) {
      float low[2] = {sum[i][0], sum[i][1]}, high[2] = {sum[i][2], sum[i][3]};
      if constexpr (groups == 8) low[0] += low[1], high[0] += high[1];
#pragma unroll
      for (int e = 0; e < kTokens; ++e) low[e] = exchange(t < 2, low[e], high[e], 2);
      const float value = kTokens == 2 ? exchange(t % 2 == 0, low[0], low[kTokens - 1], 1)
                                       : low[0] + __shfl_xor_sync(kAllLanes, low[0], 1);
      if (t % 2 < tokens_) store(t % 2, i * kTileN + t / 2 * 8 + g, value * kFp4Unit);
    }
  }

 private:
  static constexpr int kTokens = 8 / groups, kGroupBytes = kTileN * 2;
  static __device__ __forceinline__ int lane() { return threadIdx.x % 32; }

  // Keeps one of two values, adds the partner lane's copy of it, and gives that lane the other value.
  static __device__ __forceinline__ float exchange(bool first, float a, float b, int distance) {
    return (first ? a : b) + __shfl_xor_sync(kAllLanes, first ? b : a, distance);
  }

  const int tokens_;
  const uint32_t x_, zeros_, scales_;
};

}  // namespace qao::gemm::sm90_skinny::smem
