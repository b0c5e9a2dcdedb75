// Conversion of 32 columns of x and W to mma.sync operands, per pair of formats.
//
// Registers of a thread for a k-step of 32 columns, with g = lane / 4 and t = lane % 4:
//   8-bit W   four words: rows g and g + 8, columns 4t..4t+3; the same 16 columns on
//   4-bit W   two words of 16 columns each: row g in the low nibbles, row g + 8 in the high ones
//   8-bit x   two words: token g, columns as in W
//   16-bit x  four words, columns 4t..4t+3 and 16 + 4t..
// weight_only_int4.cuh and weight_only_fp4.cuh: 4-bit W with a float x. k-steps have 16 columns, and W one word.
//
// The columns of a k-step may be summed in any order, so words are multiplied without reordering: it suffices that each
// byte of W meets its byte of x.
#pragma once

#include "common/centred.cuh"
#include "common/mma8.cuh"
#include "common/widen.cuh"
#include "qao/types.h"

namespace qao::gemm::sm80_mma {

using widen::Fp8;
using widen::Int8;
struct Int4 {};
struct Fp8Mma {};  // fp8 on the fp8 tensor cores of sm_89 and newer

// Members: Sum, the accumulator type; kXFormat, kXBytes per element; kWeight; kMmas per k-step; weight() and x()
// convert words to operands; mma(). value = kFactor * MMA operand. int4: factors for rows g and g + 8. kSumsRows: row g
// + 8 of the operand is the sum of both rows. kCentred: weight() subtracts the integer parts of zero points.
template <typename X, typename W>
struct Product;

template <>
struct Product<Int8, Int8> {
  using Sum = int;
  static constexpr int kXBytes = 1, kMmas = 1;
  static constexpr Format kXFormat = Format::kInt8, kWeight = Format::kInt8;
  static constexpr float kFactor = 1;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[4], uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) a[0][i] = words[i];
  }
  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    b[0][0] = words[0], b[0][1] = words[1];
  }
  static __device__ __forceinline__ void mma(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma8::s8_s8(d, a, b);
  }
};

// Nibbles are not shifted: those of row g + 8 count 16 times.
template <>
struct Product<Int8, Int4> {
  using Sum = int;
  static constexpr int kXBytes = 1, kMmas = 1;
  static constexpr Format kXFormat = Format::kInt8, kWeight = Format::kInt4;
  static constexpr float kFactor = 1, kHighFactor = 0x1p-4f;
  static constexpr bool kSumsRows = false, kCentred = false;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[2], uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      a[0][2 * i] = words[i] & 0x0F0F0F0F;
      a[0][2 * i + 1] = words[i] & 0xF0F0F0F0;
    }
  }
  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    b[0][0] = words[0], b[0][1] = words[1];
  }
  static __device__ __forceinline__ void mma(int (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma8::u8_s8(d, a, b);
  }
};

template <>
struct Product<Fp8Mma, Fp8> {
  using Sum = float;
  static constexpr int kXBytes = 1, kMmas = 1;
  static constexpr Format kXFormat = Format::kFp8, kWeight = Format::kFp8;
  static constexpr float kFactor = 1;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[4], uint32_t (&a)[1][4]) {
    Product<Int8, Int8>::weight(words, a);
  }
  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    Product<Int8, Int8>::x(words, b);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma8::e4m3_e4m3(d, a, b);
  }
};

template <>
struct Product<Fp8Mma, Int4> {
  using Sum = float;
  static constexpr int kXBytes = 1, kMmas = 1;
  static constexpr Format kXFormat = Format::kFp8, kWeight = Format::kInt4;
  static constexpr float kFactor = centred::kE4m3Factor, kHighFactor = kFactor;
  static constexpr bool kSumsRows = false, kCentred = true;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[2], const centred::Codes& codes,
                                                uint32_t (&a)[1][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) centred::e4m3_rows(words[i], codes, a[0][2 * i], a[0][2 * i + 1]);
  }
  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[1][2]) {
    Product<Int8, Int8>::x(words, b);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    mma8::e4m3_e4m3(d, a, b);
  }
};

// 16-bit tensor cores: both operands are converted to T, 16 columns per MMA.
template <typename T, typename W>
struct WidenedWeight {
  using Sum = float;
  static constexpr int kMmas = 2;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[4], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t pairs[2];
      widen::Widen<W, T>::run(words[i], pairs);
      a[i / 2][i % 2] = pairs[0], a[i / 2][i % 2 + 2] = pairs[1];
    }
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Half<T>::mma(d, a, b[0], b[1]);
  }
};

template <>
struct Product<Fp8, Fp8> : WidenedWeight<__half, Fp8> {
  static constexpr int kXBytes = 1;
  static constexpr Format kXFormat = Format::kFp8, kWeight = Format::kFp8;
  static constexpr float kFactor = widen::Widen<Fp8, __half>::kFactor * widen::Widen<Fp8, __half>::kFactor;

  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) widen::Widen<Fp8, __half>::run(words[i], b[i]);
  }
};

// A byte in the low half of a float16 is a subnormal number of that value times 2^-24. So row g of the operand is q[g],
// row g + 8 is q[g] + 16 q[g + 8].
template <>
struct Product<Fp8, Int4> {
  using Sum = float;
  static constexpr int kXBytes = 1, kMmas = 2;
  static constexpr Format kXFormat = Format::kFp8, kWeight = Format::kInt4;
  static constexpr float kFactor = 0x1p24f * widen::Widen<Fp8, __half>::kFactor, kHighFactor = kFactor / 16;
  static constexpr bool kSumsRows = true, kCentred = false;

  static __device__ __forceinline__ void weight(const uint32_t (&words)[2], uint32_t (&a)[2][4]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t odd = __byte_perm(words[i], 0, 0x4341);
      a[i][0] = words[i] & 0x000F000F, a[i][1] = words[i] & 0x00FF00FF;
      a[i][2] = odd & 0x000F000F, a[i][3] = odd;
    }
  }
  // The columns of a nibble pair are two bytes apart.
  static __device__ __forceinline__ void x(const uint32_t (&words)[2], uint32_t (&b)[2][2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) widen::Widen<Fp8, __half>::run(__byte_perm(words[i], 0, 0x3120), b[i]);
  }
  static __device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    Half<__half>::mma(d, a, b[0], b[1]);
  }
};

template <typename T, typename W>
struct FloatX : WidenedWeight<T, W> {
  static constexpr Format kXFormat = Format::kFloat;
  static constexpr int kXBytes = 2;
  static constexpr float kFactor = widen::Widen<W, T>::kFactor;
};
template <typename T>
struct Product<T, Int8> : FloatX<T, Int8> {
  static constexpr Format kWeight = Format::kInt8;
};
template <typename T>
struct Product<T, Fp8> : FloatX<T, Fp8> {
  static constexpr Format kWeight = Format::kFp8;
};

// What Cta::read_codes() gives: integer zero points, or what a float x with 4-bit W needs of a group.
template <typename Product>
struct CodesOf {
  using Type = centred::Codes;
};
template <typename Product>
  requires requires { typename Product::Codes; }
struct CodesOf<Product> {
  using Type = typename Product::Codes;
};

// Groups per K-tile where the format of W fixes them, else 0.
template <typename Product>
inline constexpr int kGroupsOfKTile = 0;

// Whether the conversion of W loses NaN, which must then be restored in the sums.
template <typename X, typename W>
inline constexpr bool kLosesNan = false;
template <>
inline constexpr bool kLosesNan<__nv_bfloat16, Fp8> = true;

}  // namespace qao::gemm::sm80_mma
