// fp4 W (layout/fp4.h) with a float x: conversion of W to the 16-bit type of x.
// It has no zero points, and groups of half a K-tile or of one k-step. Codes are exact in 16 bits. Scales are applied
// to float32 sums of a group, row divisors to the sums of the whole row.
#pragma once

#include "common/fp4.cuh"
#include "gemm/sm80_mma/tile.h"
#include "gemm/sm80_mma/weight_only_int4.cuh"
#include "layout/fp4.h"

namespace qao::gemm::sm80_mma {

// `groups` per K-tile: 2 or 4.
template <int groups>
struct FloatFp4 {};

template <typename T, int groups>
struct Product<T, FloatFp4<groups>> : WeightOnly<T, Format::kFp4> {
  static constexpr bool kConvertsByGroup = false;

  // Scales of rows g and g + 8.
  struct Codes {
    float scale[2];
  };
  static __device__ __forceinline__ Codes read_codes(uint32_t from, int row, DType) {
    return {load_shared_float<DType::kBFloat16>(from + row * 2),
            load_shared_float<DType::kBFloat16>(from + (row + 8) * 2)};
  }
  static __device__ __forceinline__ void weight(uint32_t word, const Codes&, bool, uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[0][i] = Half<T>::multiply_add(fp4::small_pair<T>(word, i), fp4::Place<T>::kFactor, 0x80008000u);
    }
  }

  // NVFP4: divides by the divisors of the rows.
  template <typename Warp>
  static __device__ __forceinline__ void finish(Warp& warp) {
    if constexpr (groups == 4) {
      const auto& cta = warp.cta;
      const uint8_t* scales = cta.p.group_scales;
#pragma unroll
      for (int i = 0; i < Warp::Tile::kTilesN; ++i) {
        const int row_tile = cta.row_tile0 + i * Warp::Tile::kWarpsN + cta.warp_n;
        if (row_tile >= cta.p.row_tiles) continue;
        const int64_t first = static_cast<int64_t>(row_tile + 1) * cta.p.groups - fp4::kRowParts;
#pragma unroll
        for (int high = 0; high < 2; ++high) {
          const int64_t at = first * kTileN + cta.lane / 4 + high * 8;
          const float divisor = load_float(scales, at, DType::kBFloat16) +
                                load_float(scales, at + kTileN, DType::kBFloat16) +
                                load_float(scales, at + 2 * kTileN, DType::kBFloat16);
#pragma unroll
          for (int j = 0; j < Warp::Tile::kTilesM; ++j) {
            warp.sum[i][j][2 * high] /= divisor, warp.sum[i][j][2 * high + 1] /= divisor;
          }
        }
      }
    }
  }
};

template <typename T, int groups>
inline constexpr int kGroupsOfKTile<Product<T, FloatFp4<groups>>> = groups;

}  // namespace qao::gemm::sm80_mma
