// Portable W4A16 kernel for int4 weights: mma.sync with swap-AB.
// Weights are the 16-row operand and tokens the 8-column one. It supports every M. Tile shapes are the rows of
// weight_only_tiles.inc.
#pragma once

#include "gemm/sm80_mma/weight_only_load.cuh"

namespace qao::gemm::sm80_mma::weight_only {

// Loads the B operands of k-step `step` (and of step + 1 if a warp has only 8 tokens) for all tokens of the warp.
template <typename Cta, typename Tile>
__device__ __forceinline__ void load_x(const Cta& cta, uint32_t x, int step,
                                       uint32_t (&b)[(Tile::kTilesM + 1) / 2][4]) {
  const int first = cta.warp_m * Tile::kTilesM * 8;
  if constexpr (Tile::kTilesM == 1) {
    ptx::ldmatrix_x4(b[0], x + Cta::x_offset(first + cta.lane % 8, 2 * step + cta.lane / 8));
  } else {
#pragma unroll
    for (int pair = 0; pair < Tile::kTilesM / 2; ++pair) {
      const int row = first + pair * 16 + cta.lane / 16 * 8 + cta.lane % 8;
      ptx::ldmatrix_x4(b[pair], x + Cta::x_offset(row, 2 * step + cta.lane / 8 % 2));
    }
  }
}

// Multiplies the k-steps of one K-tile that share a group, and accumulates the scaled sums.
template <int first_step, int steps, typename T, typename Tile, typename Cta>
__device__ __forceinline__ void multiply(const Cta& cta, uint32_t stage, const uint4 (&words)[Tile::kTilesN],
                                         typename Cta::Sums& sum) {
  typename Cta::Group groups[Tile::kTilesN];
#pragma unroll
  for (int i = 0; i < Tile::kTilesN; ++i) cta.read_group(stage, first_step / 2 * (steps == 2), i, groups[i]);
  const bool fractions = cta.any_fraction(groups);
  float product[Tile::kTilesN][Tile::kTilesM][4] = {};
  uint32_t b[(Tile::kTilesM + 1) / 2][4];
#pragma unroll
  for (int step = first_step; step < first_step + steps; ++step) {
    if (Tile::kTilesM > 1 || step % 2 == 0) load_x<Cta, Tile>(cta, Cta::x_address(stage), step, b);
#pragma unroll
    for (int i = 0; i < Tile::kTilesN; ++i) {
      uint32_t a[4];
      Cta::dequantize(Cta::word_of(words[i], step), groups[i], a);
      if (fractions) Cta::take_fraction(groups[i], a);
#pragma unroll
      for (int j = 0; j < Tile::kTilesM; ++j) {
        const int first = Tile::kTilesM == 1 ? step % 2 * 2 : j % 2 * 2;
        Half<T>::mma(product[i][j], a, b[j / 2][first], b[j / 2][first + 1]);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < Tile::kTilesN; ++i) {
#pragma unroll
    for (int j = 0; j < Tile::kTilesM; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[i][j][e] += groups[i].scale[e / 2] * product[i][j][e];
    }
  }
}

// Mainloop over this slice's share of K-tiles [begin, end): calls multiply(stage, words).
template <typename Tile, typename Cta, typename Multiply>
__device__ __forceinline__ void walk(Cta& cta, int begin, int end, const Multiply& multiply) {
  const int steps = (end - begin + Tile::kWarpsK - 1) / Tile::kWarpsK;
  const int mine = (end - begin - cta.slice + Tile::kWarpsK - 1) / Tile::kWarpsK;  // steps, or one fewer
  cta.seek(begin + cta.slice);
#pragma unroll
  for (int i = 0; i < Tile::kStages - 1; ++i) {
    if (i < mine) cta.fetch(i);
    ptx::cp_async_commit();
    cta.advance();
  }
  int stage_now = 0, stage_ahead = Tile::kStages - 1;
  for (int i = 0; i < steps; ++i) {
    ptx::cp_async_wait<Tile::kStages - 2>();
    cta.sync_slice();  // this stage has arrived in all threads, and all have read the previous one
    if (i + Tile::kStages - 1 < mine) cta.fetch(stage_ahead);
    ptx::cp_async_commit();
    cta.advance();
    const uint32_t stage = cta.stage_address(stage_now);
    stage_ahead = stage_now;
    stage_now = stage_now + 1 == Tile::kStages ? 0 : stage_now + 1;
    if (i >= mine) continue;
    uint4 words[Tile::kTilesN];
#pragma unroll
    for (int j = 0; j < Tile::kTilesN; ++j) words[j] = cta.read_words(stage, j);
    multiply(stage, words);
  }
}

template <bool two_groups, typename T, typename Tile, typename Cta>
__device__ __forceinline__ void main_loop(Cta& cta, int begin, int end, typename Cta::Sums& sum) {
  walk<Tile>(cta, begin, end, [&](uint32_t stage, const uint4(&words)[Tile::kTilesN]) {
    if constexpr (two_groups) {
      multiply<0, 2, T, Tile>(cta, stage, words, sum);
      multiply<2, 2, T, Tile>(cta, stage, words, sum);
    } else {
      multiply<0, 4, T, Tile>(cta, stage, words, sum);
    }
  });
}

template <typename T, typename Tile, bool zeros>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kCtasPerSm) sm80_mma_w4a16(const Params p) {
  extern __shared__ __align__(1024) uint8_t shared[];
  const Place at = place<Tile>(p);
  Cta<T, Tile, zeros> cta(p, at.row_block, at.token_block, ptx::shared_address(shared));
  typename Cta<T, Tile, zeros>::Sums sum = {};
  if (p.group_shift < 0) {
    main_loop<true, T, Tile>(cta, at.begin, at.end, sum);
  } else {
    main_loop<false, T, Tile>(cta, at.begin, at.end, sum);
  }
  cta.write_result(sum, reinterpret_cast<float*>(shared), at.split);
}

}  // namespace qao::gemm::sm80_mma::weight_only
