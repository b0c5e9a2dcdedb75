// int4 W with a float x: conversion of W to the 16-bit type of x.
//
//   y[m][n] = sum over groups of  scale[n] * sum over k of (q - zero)[n][k] x[m][k]
//
// (q - zero) is exact in the 16-bit type (rounded once if zero is a fraction); scales are applied to float32 sums.
#pragma once

#include "common/convert.cuh"
#include "common/mma.cuh"
#include "gemm/sm80_mma/operand_conversion.cuh"
#include "layout/int4.h"

namespace qao::gemm::sm80_mma {

template <typename T, Format weight_format>
struct WeightOnly {
  using Sum = float;
  static constexpr int kXBytes = 2, kMmas = 1;
  static constexpr Format kXFormat = Format::kFloat, kWeight = weight_format;
  static constexpr bool kSumsRows = false, kCentred = false, kZeros = false;

  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    b[0][0] = words[0], b[0][1] = words[1];
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Half<T>::mma(d, a, b[0], b[1]);
  }
  // Ends the sums of a warp.
  template <typename Warp>
  static __device__ __forceinline__ void finish(Warp&) {}
};

// `zeros`: W has zero points, else all are int4::kSymmetricZero.
template <bool zeros>
struct FloatInt4 {};

template <typename T, bool zeros>
struct Product<T, FloatInt4<zeros>> : WeightOnly<T, Format::kInt4> {
  static constexpr bool kConvertsByGroup = true, kZeros = zeros;

  // Parameters of a group for rows g and g + 8 of one n-tile. Weights are computed as ((magic + q) + offset) + fraction
  // in pairs of T, so the integer part of the zero point is subtracted exactly.
  struct Codes {
    float scale[2];
    uint32_t offset[2], fraction[2];
  };
  template <DType dtype>
  static __device__ __forceinline__ Codes read_codes(uint32_t from, int row) {
    Codes to;
#pragma unroll
    for (int high = 0; high < 2; ++high) {
      const uint32_t at = from + (row + high * 8) * size_of(dtype);
      to.scale[high] = load_shared_float<dtype>(at);
      if constexpr (zeros && dtype == Half<T>::kDType) {
        // Adding the magic number rounds to an integer.
        const uint32_t minus_zero =
            Half<T>::negate(Half<T>::pair(ptx::load_shared_2(at + int4::kTileN * size_of(dtype))));
        to.offset[high] = Half<T>::add(minus_zero, Half<T>::pair(-Half<T>::kMagicValue));
        to.fraction[high] = Half<T>::add(
            Half<T>::negate(Half<T>::add(to.offset[high], Half<T>::pair(Half<T>::kMagicValue))), minus_zero);
      } else if constexpr (zeros) {
        const float zero = load_shared_float<dtype>(at + int4::kTileN * size_of(dtype));
        to.offset[high] = Half<T>::pair(-Half<T>::kMagicValue - zero);
        to.fraction[high] = Half<T>::pair(-Half<T>::kMagicValue - zero - Half<T>::low(to.offset[high]));
      } else {
        to.offset[high] = Half<T>::pair(-Half<T>::kMagicValue - int4::kSymmetricZero);
      }
    }
    return to;
  }
  static __device__ __forceinline__ Codes read_codes(uint32_t from, int row, DType dtype) {
    if (dtype == DType::kBFloat16) return read_codes<DType::kBFloat16>(from, row);
    if (dtype == DType::kFloat16) return read_codes<DType::kFloat16>(from, row);
    return read_codes<DType::kFloat32>(from, row);
  }

  // Most zero points are integers. The fraction is subtracted only if a row of this warp has one. With a float32 x
  // (`parts`) it would be rounded here, so add_fractions() subtracts it instead.
  template <int count>
  static __device__ __forceinline__ bool any_fraction(const Codes (&codes)[count], int parts) {
    uint32_t bits = 0;
#pragma unroll
    for (int i = 0; zeros && i < count; ++i) bits |= codes[i].fraction[0] | codes[i].fraction[1];
    return zeros && parts == 1 && __any_sync(0xFFFFFFFFu, (bits & 0x7FFF7FFF) != 0);
  }
  // Converts W to the A operand of one k-step, minus the zero point. Registers are rows g, g + 8, g, g + 8.
  static __device__ __forceinline__ void weight(uint32_t word, const Codes& codes, bool fractions,
                                                uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      a[0][i] = Half<T>::add(ptx::and_or(word >> (4 * i), 0x000F000F, Half<T>::kMagic), codes.offset[i % 2]);
    }
    if (!fractions) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = Half<T>::add(a[0][i], codes.fraction[i % 2]);
  }
};

}  // namespace qao::gemm::sm80_mma
