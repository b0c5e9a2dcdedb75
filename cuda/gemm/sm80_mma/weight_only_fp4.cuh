// Portable W4A16 kernel for fp4 weights (layout/fp4.h).
// It differs from weight_only_mainloop.cuh in the conversion of codes, has no zero points, and has groups of half a
// K-tile or of one k-step. Codes are exact in 16 bits. Scales are applied to float32 sums of a group, row divisors to
// the sums of the whole row.
#pragma once

#include "common/fp4.cuh"
#include "gemm/sm80_mma/weight_only_mainloop.cuh"
#include "layout/fp4.h"

namespace qao::gemm::sm80_mma::weight_only {

// `groups` per K-tile: 2 or 4.
template <typename T, typename Tile, int groups>
struct Fp4Cta : Cta<T, Tile, false> {
  using Base = Cta<T, Tile, false>;
  using Base::Base;
  using typename Base::Sums;
  static constexpr int kGroupBytes = kTileN * 2;

  // Issues the copies of the current K-tile, as Cta::fetch.
  __device__ __forceinline__ void fetch(int stage) const {
    const uint32_t to = this->stage_address(stage);
    this->fetch_weight(to);
    if (this->p.x_aligned && (this->k_tile + 1) * kTileK <= this->p.k) {
      this->fetch_x(Base::x_address(to));
    } else {
      Base::fetch_x_edge(Base::x_address(to), this->x, this->p.x_stride, this->p.k - this->k_tile * kTileK,
                         this->tokens);
    }
    fetch_scales(Base::scale_address(to));
  }

  // Copies the scales of all groups of the K-tile, zeros past K.
  __device__ __forceinline__ void fetch_scales(uint32_t to) const {
    constexpr int kChunks = groups * kGroupBytes / 16;
    const int group = groups * this->k_tile;
    for (int i = this->slice_thread; i < this->row_tiles * kChunks; i += Tile::kSliceThreads) {
      const int row_tile = i / kChunks, chunk = i % kChunks;
      const uint32_t at = to + row_tile * Tile::kScaleTileBytes + chunk * 16;
      if (group + chunk * 16 / kGroupBytes < this->p.groups) {
        const int64_t from = static_cast<int64_t>(this->row_tile0 + row_tile) * this->p.groups + group;
        ptx::cp_async_16(at, this->p.scales + from * kGroupBytes + chunk * 16);
      } else {
        ptx::store_shared_16(at, {0, 0, 0, 0});
      }
    }
  }

  // Scales of rows g and g + 8 of n-tile i of this warp.
  __device__ __forceinline__ void read_scales(uint32_t stage, int group, int i, float (&scale)[2]) const {
    const uint32_t from =
        Base::scale_address(stage) + (i * Tile::kWarpsN + this->warp_n) * Tile::kScaleTileBytes + group * kGroupBytes;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      scale[high] = load_shared_float<DType::kBFloat16>(from + (this->lane / 4 + high * 8) * 2);
    }
  }

  // Converts W to the A operand of one k-step.
  static __device__ __forceinline__ void widen(uint32_t word, uint32_t (&a)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[i] = Half<T>::multiply_add(fp4::small_pair<T>(word, i), fp4::Place<T>::kFactor, 0x80008000u);
    }
  }

  // NVFP4: divides by the divisors of the rows.
  __device__ __forceinline__ void divide_rows(Sums& sum) const {
    if constexpr (groups == 4) {
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
        const int row_tile = this->row_tile0 + i * Tile::kWarpsN + this->warp_n;
        if (row_tile >= this->p.row_tiles) continue;
        const int64_t first = static_cast<int64_t>(row_tile + 1) * this->p.groups - fp4::kRowParts;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          const int64_t at = first * kTileN + this->lane / 4 + high * 8;
          const float divisor = load_float(this->p.scales, at, DType::kBFloat16) +
                                load_float(this->p.scales, at + kTileN, DType::kBFloat16) +
                                load_float(this->p.scales, at + 2 * kTileN, DType::kBFloat16);
#pragma unroll
          for (int j = 0; j < Tile::kTilesM; ++j) {
            sum[i][j][2 * high] /= divisor, sum[i][j][2 * high + 1] /= divisor;
          }
        }
      }
    }
  }
};

// Multiplies one K-tile, group by group, and accumulates the scaled sums.
template <int groups, typename T, typename Tile, typename Cta>
__device__ __forceinline__ void multiply_fp4(const Cta& cta, uint32_t stage, const uint4 (&words)[Tile::kTilesN],
                                             typename Cta::Sums& sum) {
  constexpr int kSteps = 4 / groups;
  uint32_t b[(Tile::kTilesM + 1) / 2][4];
#pragma unroll
  for (int group = 0; group < groups; ++group) {
    float product[Tile::kTilesN][Tile::kTilesM][4] = {};
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int step = group * kSteps + s;
      if (Tile::kTilesM > 1 || step % 2 == 0) load_x<Cta, Tile>(cta, Cta::x_address(stage), step, b);
#pragma unroll
      for (int i = 0; i < Tile::kTilesN; ++i) {
        uint32_t a[4];
        Cta::widen(Cta::word_of(words[i], step), a);
#pragma unroll
        for (int j = 0; j < Tile::kTilesM; ++j) {
          const int first = Tile::kTilesM == 1 ? step % 2 * 2 : j % 2 * 2;
          Half<T>::mma(product[i][j], a, b[j / 2][first], b[j / 2][first + 1]);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      float scale[2];
      cta.read_scales(stage, group, i, scale);
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) sum[i][j][e] += scale[e / 2] * product[i][j][e];
      }
    }
  }
}

template <int groups, typename T, typename Tile, typename Cta>
__device__ __forceinline__ void fp4_main_loop(Cta& cta, int begin, int end, typename Cta::Sums& sum) {
  walk<Tile>(cta, begin, end, [&](uint32_t stage, const uint4(&words)[Tile::kTilesN]) {
    multiply_fp4<groups, T, Tile>(cta, stage, words, sum);
  });
  cta.divide_rows(sum);
}

template <typename T, typename Tile, int groups>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) sm80_mma_wfp4a16(const Params p) {
  using ThisCta = Fp4Cta<T, Tile, groups>;
  extern __shared__ __align__(1024) uint8_t shared[];
  const Place at = place<Tile>(p);
  ThisCta cta(p, at.row_block, at.token_block, ptx::shared_address(shared));
  typename ThisCta::Sums sum = {};
  fp4_main_loop<groups, T, Tile>(cta, at.begin, at.end, sum);
  cta.write_result(sum, reinterpret_cast<float*>(shared), at.split);
}

}  // namespace qao::gemm::sm80_mma::weight_only
