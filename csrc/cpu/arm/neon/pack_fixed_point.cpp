// Rows of x as fixed point, for the kernels that multiply bytes (mm_job.h describes the form).
#include "cpu/arm/neon/tile_order.h"
#include "cpu/arm/simd.h"
#include "cpu/fixed_point.h"
#include "cpu/mm_kernels.h"

namespace qao::cpu {
namespace {

constexpr int kTileK = kTileColumns;

int32x4_t magnitude_bits(float32x4_t v) { return vreinterpretq_s32_f32(vabsq_f32(v)); }

// values[0 .. count) = x, then zeros up to a whole tile; returns the bits of the largest magnitude. Inf and NaN become
// 0 and outliers.
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
  const int32x4_t smallest = limit_of(1);  // below it: as good as 0
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

// One tile of integer words, |word| < 2^15 - 128: its high and low bytes to out[0..64) and out[64..128), sums of each
// step.
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

// The words of a tile: x's whole parts, and what each leaves in units of 2^-15 of its own.
void round_tile(const float* values, float inverse, int count, int16x8_t (&words)[kMaxWords][4][2]) {
  for (int i = 0; i < kTileK / 8; ++i) {
    float32x4_t rest[2];
    for (int half = 0; half < 2; ++half) rest[half] = vmulq_n_f32(vld1q_f32(values + 8 * i + 4 * half), inverse);
    for (int w = 0; w < count; ++w) {
      int16x4_t whole[2];
      for (int half = 0; half < 2; ++half) {
        const int32x4_t rounded = vcvtnq_s32_f32(rest[half]);
        rest[half] = vmulq_n_f32(vsubq_f32(rest[half], vcvtq_f32_s32(rounded)), 1 << kWordShift);  // exact
        whole[half] = vqmovn_s32(rounded);
      }
      words[w][i / 2][i % 2] = vcombine_s16(whole[0], whole[1]);
    }
  }
}

// Counts the row, unless it is known to have a gap.
Counts pack_row(const Job& job, int64_t m, bool gap) {
  Counts row = {};
  float values[kMaxSection];
  for (int w = 0; w <= job.words; ++w) {
    for (int64_t s = 0; s < job.sections; ++s) job.word_sums[w][m * job.sections + s] = 0;
  }
  uint64_t* outliers = job.outliers + m * job.tiles_k;
  for (int64_t t = 0; t < job.tiles_k; ++t) outliers[t] = 0;
  for (int64_t c = 0; c < job.chunks; ++c) {
    const int64_t first_tile = c * job.chunk_tiles, k0 = first_tile * kTileK;
    const int64_t tiles = job.tiles_k - first_tile < job.chunk_tiles ? job.tiles_k - first_tile : job.chunk_tiles;
    const int bits = load_chunk(job, m * job.x_stride + k0, job.k - k0, tiles * kTileK, values, outliers + first_tile);
    const auto count_below = [&](int largest, int reach) {
      return count_chunk(values, tiles * kTileK, largest, reach);
    };
    const Form form =
        choose_form(job, values, tiles * kTileK, bits, count_below, gap, outliers + first_tile, &row, job.remarks + m);
    const float inverse = bits_to_float(static_cast<uint32_t>(268 - set_form(job, m, c, form)) << 23);
    for (int64_t t = 0; t < tiles; ++t) {
      int16x8_t words[kMaxWords][4][2];
      round_tile(values + t * kTileK, inverse, form.words, words);
      for (int w = 0; w < form.words; ++w) {
        int step_sums[4] = {};
        store_words(words[w], job.fixed_point[w] + (m * job.tiles_k + first_tile + t) * 2 * kTileK, step_sums);
        for (int step = 0; step < 4; ++step) {
          const int64_t section = (k0 + t * kTileK + step * kStep) / job.section;
          if (section < job.sections) {
            job.word_sums[w][m * job.sections + section] += static_cast<float>(step_sums[step]);  // exact
          }
        }
      }
    }
  }
  return row;
}

}  // namespace

void neon::pack_fixed_point(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) {
    if (has_gap(pack_row(job, m, false))) pack_row(job, m, true);
    remark_outliers(job, m, job.outliers + m * job.tiles_k);
  }
}

}  // namespace qao::cpu
