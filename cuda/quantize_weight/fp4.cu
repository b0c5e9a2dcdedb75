// Quantization of weights to fp4, partitioned as in unit.cuh.
// A vector of eight columns is a quarter of an MXFP4 group or half of an NVFP4 group; neighboring lanes hold the rest.
// Results are bit-identical to the CPU's (qao/quantize_fp4_group.h): the same quotients, the same order of sums, and no
// fused multiply-add.
#include "common/check.h"
#include "layout/fp4.h"
#include "quantize_weight/quotient.cuh"
#include "quantize_weight/unit.cuh"

namespace qao::weight {
inline namespace fp4_kernels {

constexpr float kLargestFp4 = 6, kLargestFp8 = 448;

// Rounds to nearest even at the given number of mantissa bits, subnormal below 2^lowest: adding 1.5 * 2^23 steps leaves
// no digit below a step.
template <int mantissa, int lowest>
__device__ __forceinline__ float rounded(float magnitude) {
  constexpr uint32_t kSmallest = static_cast<uint32_t>(127 + lowest) << 23;
  constexpr uint32_t kSteps = (static_cast<uint32_t>(23 - mantissa) << 23) + (1u << 22);
  const uint32_t binade = __float_as_uint(magnitude) & 0x7F800000u;
  const float steps = __uint_as_float((binade > kSmallest ? binade : kSmallest) + kSteps);
  return __fsub_rn(__fadd_rn(magnitude, steps), steps);
}
__device__ __forceinline__ float rounded_to_fp4(float magnitude) {
  return rounded<1, 0>(fminf(magnitude, kLargestFp4));
}
__device__ __forceinline__ float rounded_to_fp8(float magnitude) {
  return rounded<3, -6>(fminf(magnitude, kLargestFp8));
}
// The three low bits of the code of a value from rounded_to_fp4: those of the float32 in units of 2^-126.
__device__ __forceinline__ uint32_t code_of(float rounded) {
  return __float_as_uint(__fmul_rn(rounded, 0x1p-126f)) >> 22;
}
__device__ __forceinline__ float power_of_two(int exponent) {  // -127 to 127
  return __uint_as_float(exponent > -127 ? static_cast<uint32_t>(exponent + 127) << 23 : 0x00400000u);
}

// Divisor of all NVFP4 scales, which makes the largest scale 448. 1 if W is all zeros or has a NaN.
__device__ __forceinline__ float divisor_of_all(float largest) {
  const float value = __fmul_rn(__fdiv_rn(1.0f, largest), kLargestFp4 * kLargestFp8);
  return value > 0 && value < INFINITY ? fminf(fmaxf(value, 0x1p-100f), 0x1p100f) : 1.0f;
}

// The two candidate scales of a group, and the quantization steps they imply.
struct Choices {
  float scale[2], step[2];
};
__device__ __forceinline__ Choices mx_choices(float largest) {
  // The largest magnitude is 4 to 8 steps. Zeros have the step that frexp gives them.
  const int biased = static_cast<int>(__float_as_uint(largest) >> 23);
  const int exponent = largest == 0 ? -3 : max(biased - 129, -127);
  const float first = power_of_two(exponent), second = power_of_two(exponent + 1);
  return {{first, second}, {first, second}};
}
// The largest magnitude is 6 steps, or 4.
__device__ __forceinline__ Choices nv_choices(float largest, const Divisor& of_all) {
  const float wanted = __fmul_rn(largest, of_all.scale);
  // Where remainders of sixths are subnormal, scales are 0 anyway.
  const Divisor six{kLargestFp4, 1.0f / kLargestFp4, false};
  const float first = rounded_to_fp8(six.quotient(wanted)), second = rounded_to_fp8(__fmul_rn(wanted, 0.25f));
  return {{first, second}, {of_all.quotient(first), of_all.quotient(second)}};
}

struct Magnitudes {
  float value[kVector];
};

// Not inlined: divisions at every call site would overflow the instruction cache.
__device__ __noinline__ Magnitudes divided(Magnitudes magnitudes, float step) {
#pragma unroll
  for (int i = 0; i < kVector; ++i) magnitudes.value[i] = __fdiv_rn(magnitudes.value[i], step);
  return magnitudes;
}

// Divides magnitudes by the step and rounds to e2m1 values. A step of 0 gives zeros.
template <bool kNv>
__device__ __forceinline__ Magnitudes in_steps(Magnitudes magnitudes, float step) {
  if constexpr (kNv) {
    Divisor by = divisor(step > 0 ? step : INFINITY);
    if (by.plain) {
      magnitudes = divided(magnitudes, by.scale);
    } else {
      by.plain = false;  // constant for the compiler
#pragma unroll
      for (int i = 0; i < kVector; ++i) magnitudes.value[i] = by.quotient(magnitudes.value[i]);
    }
  } else {
    // The inverse of a power of two, at most 2^126, is exact: the product rounds as the quotient does.
    const float inverse = step > 0x1p-127f ? __uint_as_float((254u << 23) - __float_as_uint(step)) : 0x1p127f;
#pragma unroll
    for (int i = 0; i < kVector; ++i) magnitudes.value[i] = __fmul_rn(magnitudes.value[i], inverse);
  }
#pragma unroll
  for (int i = 0; i < kVector; ++i) magnitudes.value[i] = rounded_to_fp4(magnitudes.value[i]);
  return magnitudes;
}

template <DType dtype>
__device__ __forceinline__ float largest_of(const Packed<dtype>& vector) {
  if constexpr (dtype == DType::kFloat32) {
    float value[kVector], largest = 0;
    vector.unpack(value);
#pragma unroll
    for (int i = 0; i < kVector; ++i) largest = ptx::max_or_nan(largest, fabsf(value[i]));
    return largest;
  } else {
    const uint4 part = vector.part[0];
    const uint32_t words[4] = {part.x, part.y, part.z, part.w};
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) largest = ptx::max_or_nan2<dtype>(largest, words[i] & 0x7FFF7FFF);
    largest = ptx::max_or_nan2<dtype>(largest, largest >> 16);
    if constexpr (dtype == DType::kBFloat16) return __uint_as_float(largest << 16);
    return __half2float(__ushort_as_half(static_cast<unsigned short>(largest)));
  }
}

// Whether the second candidate has the smaller squared error over a group, from the errors of this lane's columns.
// Columns 16 apart are added first, then 8, 4, 2 and 1 apart. Half of the lanes sum the first error, half the second.
template <int kLanes>
__device__ __forceinline__ bool second_is_better(const Magnitudes (&error)[2]) {
  constexpr int kFar = kLanes / 2;
  const bool upper = threadIdx.x & kFar;
  float sum[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const float mine = upper ? error[1].value[i] : error[0].value[i];
    const float theirs = upper ? error[0].value[i] : error[1].value[i];
    sum[i] = __fadd_rn(mine, __shfl_xor_sync(~0u, theirs, kFar));
  }
  if constexpr (kFar == 2) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sum[i] = __fadd_rn(sum[i], __shfl_xor_sync(~0u, sum[i], 1));
  }
#pragma unroll
  for (int apart = kVector / 2; apart > 0; apart /= 2) {
#pragma unroll
    for (int i = 0; i < apart; ++i) sum[i] = __fadd_rn(sum[i], sum[i + apart]);
  }
  const float other = __shfl_xor_sync(~0u, sum[0], kFar);
  return upper ? sum[0] < other : other < sum[0];
}

template <DType dtype, bool kNv>
__global__ void __launch_bounds__(32 * kWarps) fp4_kernel(const __grid_constant__ Params p) {
  constexpr int kLanes = kNv ? 2 : 4, kOfUnit = kUnit / kVector / kLanes;
  const auto [row_tile, first] = place_of_warp(p);
  if (row_tile >= int4::tiles_n(p.n)) return;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool stop = is_stopped(p);
  Unit<dtype> unit;
  unit.load(p, row_tile * int4::kTileN + g, first);
  const Divisor of_all = divisor(kNv ? divisor_of_all(__uint_as_float(*p.largest)) : 1.0f);
  if (stop) return;

  __nv_bfloat16* scales = static_cast<__nv_bfloat16*>(p.scales);
  const int64_t rows = fp4::scale_rows(p.k, p.columns);
  unit.store(p, row_tile, [&](int r, int j, uint32_t (&code)[4]) {
    // Find the group's largest magnitude and the candidate scales
    float largest = largest_of(unit.vector[r][j]);
#pragma unroll
    for (int lane = 1; lane < kLanes; lane *= 2) {
      largest = ptx::max_or_nan(largest, __shfl_xor_sync(~0u, largest, lane));
    }
    Choices choices;
    if constexpr (kNv) {
      choices = nv_choices(largest, of_all);
    } else {
      choices = mx_choices(largest);
    }
    // Quantize with both scales and compare the errors
    float value[kVector];
    unit.vector[r][j].unpack(value);
    Magnitudes magnitudes, to[2], error[2];
#pragma unroll
    for (int i = 0; i < kVector; ++i) magnitudes.value[i] = fabsf(value[i]);
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      to[c] = in_steps<kNv>(magnitudes, choices.step[c]);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float off = __fsub_rn(__fmul_rn(to[c].value[i], choices.step[c]), magnitudes.value[i]);
        error[c].value[i] = __fmul_rn(off, off);
      }
    }
    const bool second = second_is_better<kLanes>(error);
    const uint32_t sign_bits = (second ? choices.step[1] : choices.step[0]) > 0 ? 0x00080008 : 0;
#pragma unroll
    // Select the codes
    for (int c = 0; c < 4; ++c) {
      const uint32_t low = code_of(second ? to[1].value[2 * c] : to[0].value[2 * c]);
      const uint32_t high = code_of(second ? to[1].value[2 * c + 1] : to[0].value[2 * c + 1]);
      const uint32_t signs =
          __byte_perm(__float_as_uint(value[2 * c]), __float_as_uint(value[2 * c + 1]), 0x7632) >> 12;
      code[c] = low | high << 16 | (signs & sign_bits);
    }
    // Store the scale
    if (t % kLanes != 0) return;
    const int64_t n = row_tile * int4::kTileN + g + 8 * r;
    const int64_t group = first / p.columns + j * (kOfUnit / kVectors) + t / kLanes;
    if (group < p.block_columns) {
      const float stored = n < p.n ? (second ? choices.scale[1] : choices.scale[0]) : 0.0f;
      scales[int4::scale_offset(n, group, rows, 1, 0)] = __float2bfloat16(stored);
      if (!isfinite(largest)) *p.fault = 1;
    }
  });
  if constexpr (kNv) {
    // Store the row divisor in three bfloat16 parts
    if (first != 0 || t != 0) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int64_t n = row_tile * int4::kTileN + g + 8 * r;
      float rest = n < p.n ? of_all.scale : 1.0f;
#pragma unroll
      for (int part = 0; part < fp4::kRowParts; ++part) {
        const __nv_bfloat16 rounded = __float2bfloat16(rest);
        scales[int4::scale_offset(n, p.block_columns + part, rows, 1, 0)] = rounded;
        rest = __fsub_rn(rest, __bfloat162float(rounded));
      }
    }
  }
}

template <DType dtype>
Status launch(const Params& p, cudaStream_t stream) {
  const auto kernel = p.columns == fp4::kNvGroup ? fp4_kernel<dtype, true> : fp4_kernel<dtype, false>;
  kernel<<<ctas_of(p), 32 * kWarps, 0, stream>>>(p);
  return launch_status("launching fp4_kernel");
}

}  // namespace fp4_kernels

Status quantize_fp4(const Params& p, DType dtype, cudaStream_t stream) {
  if (dtype == DType::kFloat32) return launch<DType::kFloat32>(p, stream);
  if (dtype == DType::kFloat16) return launch<DType::kFloat16>(p, stream);
  return launch<DType::kBFloat16>(p, stream);
}

}  // namespace qao::weight
