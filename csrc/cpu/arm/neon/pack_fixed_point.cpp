// Packing of x as fixed point for kernels that multiply bytes (format in gemm/job.h).
#include "cpu/arm/neon/tile_order.h"
#include "cpu/arm/simd.h"
#include "cpu/fixed_point_rows.h"
#include "cpu/gemm/kernels.h"

namespace qao::cpu {
namespace {

constexpr int kTileK = kTileColumns;

int32x4_t magnitude_bits(float32x4_t v) { return vreinterpretq_s32_f32(vabsq_f32(v)); }

int load_chunk(const Job& job, int64_t index, int64_t count, int64_t padded, float* values, uint64_t* outliers) {
  int32x4_t largest = vdupq_n_s32(0);
  for (int64_t i = 0; i < padded; i += 4) {
    float32x4_t v = i < count ? load_first(job.x, index + i, job.x_dtype, count - i) : vdupq_n_f32(0);
    const uint32x4_t is_finite = vcltq_s32(magnitude_bits(v), vdupq_n_s32(kInfinityBits));
    if (vminvq_u32(is_finite) == 0) {
      uint32_t finite[4];
      vst1q_u32(finite, is_finite);
      for (int j = 0; j < 4; ++j) {
        if (finite[j] == 0) outliers[i / kTileK] |= uint64_t{1} << (i + j) % kTileK;
      }
      v = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), is_finite));
    }
    largest = vmaxq_s32(largest, magnitude_bits(v));
    vst1q_f32(values + i, v);
  }
  return vmaxvq_s32(largest);
}

Counts count_chunk(const float* values, int64_t count, int largest, int reach) {
  const auto limit_of = [](int exponent) { return vdupq_n_s32(exponent > 0 ? exponent << 23 : 0); };
  const int32x4_t smallest = limit_of(1);  // values below it count as 0
  int32x4_t limits[kLimitCount];
  uint32x4_t zeros = vdupq_n_u32(0), below[kLimitCount];
  for (int i = 0; i < kLimitCount; ++i) {
    limits[i] = limit_of((largest >> 23) - reach - kLimits[i].beyond);
    below[i] = zeros;
  }
  for (int64_t j = 0; j < count; j += 4) {
    const int32x4_t bits = magnitude_bits(vld1q_f32(values + j));
    zeros = vsubq_u32(zeros, vcltq_s32(bits, smallest));
    for (int i = 0; i < kLimitCount; ++i) below[i] = vsubq_u32(below[i], vcltq_s32(bits, limits[i]));
  }
  const int zero = static_cast<int>(vaddvq_u32(zeros));
  Counts counts = {static_cast<int>(count) - zero, {}};
  for (int i = 0; i < kLimitCount; ++i) counts.below[i] = static_cast<int>(vaddvq_u32(below[i])) - zero;
  return counts;
}

// Stores high and low bytes to out[0..64) and out[64..128), and the sums of each step.
void store_words(const int16x8_t (&words)[4][2], int8_t* out, int* step_sums) {
  int8x16_t high[4], low[4];
  for (int step = 0; step < 4; ++step) {
    const int16x8_t &a = words[step][0], &b = words[step][1];
    high[step] = vcombine_s8(vrshrn_n_s16(a, 8), vrshrn_n_s16(b, 8));
    low[step] = vcombine_s8(vmovn_s16(a), vmovn_s16(b));
    step_sums[step] += vaddlvq_s16(a) + vaddlvq_s16(b);
  }
  store_in_tile_order(high, out);
  store_in_tile_order(low, out + kTileK);
}

void pack_tile(const float* values, float inverse, int words, int8_t* const* out, int (*step_sums)[4], const uint8_t*) {
  int16x8_t packed[kMaxWords][4][2];
  for (int i = 0; i < kTileK / 8; ++i) {
    float32x4_t rest[2];
    for (int half = 0; half < 2; ++half) rest[half] = vmulq_n_f32(vld1q_f32(values + 8 * i + 4 * half), inverse);
    for (int w = 0; w < words; ++w) {
      int16x4_t whole[2];
      for (int half = 0; half < 2; ++half) {
        const int32x4_t rounded = vcvtnq_s32_f32(rest[half]);
        rest[half] = vmulq_n_f32(vsubq_f32(rest[half], vcvtq_f32_s32(rounded)), 1 << kWordShift);  // exact
        whole[half] = vqmovn_s32(rounded);
      }
      packed[w][i / 2][i % 2] = vcombine_s16(whole[0], whole[1]);
    }
  }
  for (int w = 0; w < words; ++w) store_words(packed[w], out[w], step_sums[w]);
}

}  // namespace

void neon::pack_fixed_point(const Job& job, int64_t begin, int64_t end) { pack_rows(job, begin, end); }

}  // namespace qao::cpu
