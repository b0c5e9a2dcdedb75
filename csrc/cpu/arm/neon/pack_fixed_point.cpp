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

Counts count_chunk(const float* values, int64_t count, int largest, int coarse) {
  const int exponent = largest >> 23;
  const auto limit_of = [exponent](int exponents) {
    return vdupq_n_s32(exponent > exponents ? (exponent - exponents) << 23 : 0);
  };
  const int32x4_t limit = limit_of(coarse), deep_limit = limit_of(kDeepExponents);
  const int32x4_t tail_limit = limit_of(coarse + kTailExponents);
  const int32x4_t smallest = vdupq_n_s32(0x00800000);  // below it: as good as 0
  uint32x4_t below = vdupq_n_u32(0), deep = below, tail = below, zeros = below;
  for (int64_t i = 0; i < count; i += 4) {
    const int32x4_t bits = magnitude_bits(vld1q_f32(values + i));
    below = vsubq_u32(below, vcltq_s32(bits, limit));
    deep = vsubq_u32(deep, vcltq_s32(bits, deep_limit));
    tail = vsubq_u32(tail, vcltq_s32(bits, tail_limit));
    zeros = vsubq_u32(zeros, vcltq_s32(bits, smallest));
  }
  const int64_t zero = vaddvq_u32(zeros);
  return {count - zero, vaddvq_u32(below) - zero, vaddvq_u32(deep) - zero, vaddvq_u32(tail) - zero};
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

// The words of a tile: x's whole parts, and what is left in units of 2^-15 of them.
void round_tile(const float* values, float inverse, int16x8_t (&words)[2][4][2]) {
  for (int i = 0; i < kTileK / 8; ++i) {
    int16x4_t whole[2], fraction[2];
    for (int half = 0; half < 2; ++half) {
      const float32x4_t v = vmulq_n_f32(vld1q_f32(values + 8 * i + 4 * half), inverse);
      const int32x4_t rounded = vcvtnq_s32_f32(v);
      const float32x4_t rest = vsubq_f32(v, vcvtq_f32_s32(rounded));  // exact
      whole[half] = vqmovn_s32(rounded);
      fraction[half] = vqmovn_s32(vcvtnq_s32_f32(vmulq_n_f32(rest, 1 << kWordShift)));
    }
    words[0][i / 2][i % 2] = vcombine_s16(whole[0], whole[1]);
    words[1][i / 2][i % 2] = vcombine_s16(fraction[0], fraction[1]);
  }
}

void pack_row(const Job& job, int64_t m) {
  float values[kMaxSection];
  float* sums = job.word_sums + m * job.sections * job.words;
  for (int64_t s = 0; s < job.sections * job.words; ++s) sums[s] = 0;
  uint64_t* outliers = job.outliers + m * job.tiles_k;
  for (int64_t t = 0; t < job.tiles_k; ++t) outliers[t] = 0;
  const int coarse = coarse_exponents(job.x_dtype);
  Tail tail, without_outliers;
  for (int64_t c = 0; c < job.chunks; ++c) {
    const int64_t first_tile = c * job.chunk_tiles, k0 = first_tile * kTileK;
    const int64_t tiles = job.tiles_k - first_tile < job.chunk_tiles ? job.tiles_k - first_tile : job.chunk_tiles;
    int bits = load_chunk(job, m * job.x_stride + k0, job.k - k0, tiles * kTileK, values, outliers + first_tile);
    const Counts counts = count_chunk(values, tiles * kTileK, bits, coarse);
    tail.nonzero += counts.nonzero, without_outliers.nonzero += counts.nonzero;
    if (has_outliers(counts)) {
      bits = move_outliers(values, tiles * kTileK, coarse, outliers + first_tile, job.remarks + m);
      add_tail(values, tiles * kTileK, bits, coarse, &without_outliers);
    } else if (may_have_gap(counts)) {
      add_tail(values, tiles * kTileK, bits, coarse, &tail);
    }
    const int exponent = (bits + kHeadroom) >> 23 > kMinExponent ? (bits + kHeadroom) >> 23 : kMinExponent;
    job.chunk_scales[m * job.chunks + c] = bits_to_float(static_cast<uint32_t>(exponent - 14) << 23);
    const float inverse = bits_to_float(static_cast<uint32_t>(268 - exponent) << 23);
    for (int64_t t = 0; t < tiles; ++t) {
      int16x8_t words[2][4][2];
      round_tile(values + t * kTileK, inverse, words);
      int8_t* out = job.fixed_point + (m * job.tiles_k + first_tile + t) * job.words * 2 * kTileK;
      for (int w = 0; w < job.words; ++w) {
        int step_sums[4] = {};
        store_words(words[w], out + w * 2 * kTileK, step_sums);
        for (int step = 0; step < 4; ++step) {
          const int64_t section = (k0 + t * kTileK + step * kStep) / job.section;
          if (section < job.sections) sums[section * job.words + w] += static_cast<float>(step_sums[step]);  // exact
        }
      }
    }
  }
  if (has_gap(tail) || has_gap(without_outliers)) job.remarks[m] |= kIsWide;
  remark_outliers(job, m, outliers);
}

}  // namespace

void neon::pack_fixed_point(const Job& job, int64_t begin, int64_t end) {
  for (int64_t m = begin; m < end; ++m) pack_row(job, m);
}

}  // namespace qao::cpu
