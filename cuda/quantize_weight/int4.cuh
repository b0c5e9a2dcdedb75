// Arithmetic of int4 scales, zero points and codes, the same as on the CPU.
// qao/quantize_group.h explains the constants.
#pragma once

#include "quantize_weight/quotient.cuh"
#include "quantize_weight/unit.cuh"

namespace qao::weight {

constexpr float kHighest = 15;
constexpr float kGridTolerance = 0x1p-4f, kWholeTolerance = 0x1p-12f, kLargestZero = 64;

__device__ __forceinline__ float rounded_to(DType dtype, float value) {
  if (dtype == DType::kFloat32) return value;
  return dtype == DType::kBFloat16 ? __bfloat162float(__float2bfloat16(value)) : __half2float(__float2half(value));
}

struct Grid {
  float scale, zero;
};

struct Bounds {
  float low = INFINITY, high = -INFINITY;
};

__device__ __forceinline__ float full_scale(const Params& p, const Bounds& bounds) {
  const float low = fminf(bounds.low, 0.0f), high = fmaxf(bounds.high, 0.0f);
  const float scale = p.symmetric ? (-low >= high ? low : high) / -8.0f : __fdiv_rn(__fsub_rn(high, low), kHighest);
  return rounded_to(p.scale_dtype, fabsf(scale) < p.smallest ? p.smallest : scale);
}
// Steps from the lowest value, if negative, to 0.
__device__ __forceinline__ float steps_below(const Bounds& bounds, float scale) {
  return __fdiv_rn(-fminf(bounds.low, 0.0f), scale);
}
__device__ __forceinline__ float whole_zero(const Params& p, float below) {
  return p.symmetric ? int4::kSymmetricZero : fminf(fmaxf(rintf(below), 0.0f), kHighest);
}
__device__ __forceinline__ bool may_be_zero(float zero) {
  return fabsf(zero) < kLargestZero && fabsf(__fsub_rn(zero, rintf(zero))) >= kWholeTolerance;
}

__device__ __forceinline__ Grid search_none(const Params& p, const Bounds& bounds) {
  const float scale = full_scale(p, bounds);
  return {scale, whole_zero(p, steps_below(bounds, scale))};
}

// The grid of a group with values on sixteen steps from the lowest to the highest. Scale 0 if that is excluded.
__device__ __forceinline__ Grid sixteen_steps(const Params& p, const Bounds& bounds) {
  const float scale = rounded_to(p.scale_dtype, __fdiv_rn(__fsub_rn(bounds.high, bounds.low), kHighest));
  if (!(scale > p.smallest)) return {0, 0};
  const float zero = rounded_to(p.scale_dtype, __fdiv_rn(-bounds.low, scale));
  return may_be_zero(zero) ? Grid{scale, zero} : Grid{0, 0};
}

__device__ __forceinline__ bool misses(float value, const Grid& grid, const Divisor& by) {
  const float steps = __fadd_rn(by.quotient(value), grid.zero);
  return !(fabsf(__fsub_rn(steps, fminf(fmaxf(rintf(steps), 0.0f), kHighest))) < kGridTolerance);
}
// An approximation that implies `misses` for a scale that is not `plain`.
__device__ __forceinline__ bool surely_misses(float value, float inverse, float zero) {
  const float steps = fmaf(value, inverse, zero);
  return !(fabsf(steps - rintf(steps)) < 1.125f * kGridTolerance);
}

// A grid with an integer zero point, prepared for computing codes. kTwice: quotients are rounded to nearest. For 16-bit
// values and scales, one correction suffices: with 11-bit operands, a quotient that is not halfway between two integers
// is at least 2^-13 away from that, and one that is halfway is exact.
template <bool kTwice>
struct Steps {
  float scale, inverse;
  uint32_t zeros;  // the zero point, in both 16-bit halves

  __device__ __forceinline__ explicit Steps(const Grid& grid)
      : scale(grid.scale),
        inverse(kTwice ? divisor(grid.scale).inverse : ptx::reciprocal(grid.scale)),
        zeros(static_cast<uint32_t>(grid.zero) * 0x10001u) {}

  // Adding 1.5 * 2^23 rounds a quotient to an integer, which is then the sum's low 16 bits.
  __device__ __forceinline__ uint32_t round(float value) const {
    float q = __fmul_rn(value, inverse);
    q = fmaf(fmaf(-q, scale, value), inverse, q);
    if constexpr (kTwice) q = fmaf(fmaf(-q, scale, value), inverse, q);
    return __float_as_uint(__fadd_rn(q, 0x1.8p23f));
  }
  template <DType dtype>
  __device__ __forceinline__ void codes(const Packed<dtype>& vector, uint32_t (&code)[4]) const {
    float value[kVector];
    vector.unpack(value);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const uint32_t pair = __byte_perm(round(value[2 * c]), round(value[2 * c + 1]), 0x5410);
      code[c] = __viaddmin_s16x2_relu(pair, zeros, 0x000F000F);
    }
  }
};

// Whether the scale needs a division, because remainders could be subnormal. In a group of zeros they are 0.
__device__ __forceinline__ bool needs_division(const Bounds& bounds, float scale) {
  return divisor(scale).plain && !(bounds.low == 0 && bounds.high == 0);
}

// Stores both tiles to `q` with any grids, grid[r][j] per vector.
template <DType dtype>
__device__ __noinline__ void store_slowly(const Params& p, const Unit<dtype>& unit, int64_t row_tile,
                                          const Grid (&grid)[2][kVectors]) {
  uint32_t codes[2 * kVectors][4];
#pragma unroll 1
  for (int of = 0; of < 2 * kVectors; ++of) {
    const int r = of / kVectors, j = of % kVectors;
    const float zero = grid[r][j].zero;
    const Divisor by = divisor(grid[r][j].scale);
    const bool whole = zero == rintf(zero);
    const float inside = whole ? 0.0f : zero, outside = whole ? zero : 0.0f;
    float value[kVector];
    unit.vector[r][j].unpack(value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float steps = rintf(__fadd_rn(by.quotient(value[i]), inside));
      value[i] = fminf(fmaxf(__fadd_rn(steps, outside), 0.0f), kHighest);
    }
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      codes[of][c] = static_cast<uint32_t>(value[2 * c]) | static_cast<uint32_t>(value[2 * c + 1]) << 16;
    }
  }
  unit.store(p, row_tile, [&](int r, int j, uint32_t (&code)[4]) {
#pragma unroll
    for (int c = 0; c < 4; ++c) code[c] = codes[r * kVectors + j][c];
  });
}

// Stores the scale, and the zero point if any, of a row and group.
__device__ __forceinline__ void store_scales(const Params& p, int64_t n, int64_t group, const Grid& grid) {
  if (group >= p.block_columns) return;
  const int parameters = p.symmetric ? 1 : 2;
  const bool inside = n < p.n;
  store_float(p.scales, int4::scale_offset(n, group, p.block_columns, parameters, 0), p.scale_dtype,
              inside ? grid.scale : 0.0f);
  if (!p.symmetric) {
    store_float(p.scales, int4::scale_offset(n, group, p.block_columns, parameters, 1), p.scale_dtype,
                inside ? grid.zero : int4::kSymmetricZero);
  }
  if (inside && !isfinite(grid.scale)) *p.fault = 1;
}

}  // namespace qao::weight
