// GEMM of int4 W and rows of bytes, for every instruction set.
// A row of int8 x is one row of bytes; a row in fixed point is two (high and low) per word. Lanes run along K. Four row
// pairs (g, g + 8) of W, eight rows, meet up to two rows of bytes.
//
// Per section, with exact integer sums:  y += scale * (sum(q * x) - zero * sum(x)).
// Zero points, x's first, are subtracted per section and not at the end: if x is far from 0 along all of K, both sums
// are large.
//
// fp4 W (cuda/layout/fp4.h) uses `tbl` in place of masks: bytes are twice the values, and there are no zero points. A
// tile has one group per half, or per k-step.
//
// `Dot` provides the instructions (lane_dot.h).
#pragma once

#include "cpu/arm/simd.h"
#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"
#include "layout/fp4.h"
#include "layout/int4.h"

namespace qao::cpu {
namespace {

using int4::kTileBytes;
using int4::kTileK;
using int4::kTileN;

constexpr int kPairs = 4;                // of W at a time
constexpr int kQuads = kTileN / kPairs;  // quads of rows of an N-tile

// Scales and zero points of an N-tile and a section, by quad of rows.
struct Parameters {
  float32x4_t scale[kQuads], zero[kQuads];
};
Parameters load_parameters(const Job& job, int64_t tile, int64_t s) {
  const int64_t at = (tile * job.groups + s / job.sections_per_group) * job.parameters * kTileN;
  Parameters parameters;
  for (int q = 0; q < kQuads; ++q) {
    parameters.scale[q] = load4(job.scales, at + 4 * q, job.scale_dtype);
    parameters.zero[q] = job.parameters == 2 ? load4(job.scales, at + kTileN + 4 * q, job.scale_dtype)
                                             : vdupq_n_f32(int4::kSymmetricZero);
  }
  return parameters;
}

// Expands sixteen bytes to rows g and g + 8.
template <Format kFormat>
__attribute__((always_inline)) inline void widen(uint8x16_t both, int8x16_t* low, int8x16_t* high) {
  const uint8x16_t lower = vandq_u8(both, vdupq_n_u8(15)), upper = vshrq_n_u8(both, 4);
  if constexpr (kFormat == Format::kFp4) {
    constexpr int8_t kTwice[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const int8x16_t entries = vld1q_s8(kTwice);
    *low = vqtbl1q_s8(entries, lower), *high = vqtbl1q_s8(entries, upper);
  } else {
    *low = vreinterpretq_s8_u8(lower), *high = vreinterpretq_s8_u8(upper);
  }
}

// Multiplies tiles of W from `pairs` on by rows of bytes x_row apart. Tiles of x are x_tile apart.
template <int kV, Format kFormat = Format::kInt4>
__attribute__((always_inline)) inline Dot::Sums<2 * kPairs, kV> multiply(const uint8_t* pairs, const int8_t* x,
                                                                         int64_t x_row, int64_t x_tile, int64_t tiles) {
  Dot::Sums<2 * kPairs, kV> sums;
  for (int64_t t = 0; t < tiles; ++t, pairs += kTileBytes, x += x_tile) {
#pragma GCC unroll 4
    for (int v = 0; v < kTileK; v += 16) {
      int8x16_t w[2 * kPairs], bytes[kV];
#pragma GCC unroll 4
      for (int g = 0; g < kPairs; ++g) {
        widen<kFormat>(vld1q_u8(pairs + g * kTileK + v), &w[g], &w[g + kPairs]);
      }
#pragma GCC unroll 2
      for (int i = 0; i < kV; ++i) bytes[i] = vld1q_s8(x + i * x_row + v);
      sums.add(w, bytes);
    }
  }
  return sums;
}

// Per-section parameters of x.
struct Words {
  int count;
  float sums[kMaxWords];  // of the section
  float scale;
};
Words words_of(const Job& job, int64_t m, int64_t chunk, int64_t s) {
  const int64_t at = m * job.sections + s, c = m * job.fixed_point.chunks + chunk;
  Words words = {job.fixed_point.chunk_words[c], {}, job.fixed_point.scales[c]};
  for (int w = 0; w < words.count; ++w) words.sums[w] = job.fixed_point.sums[w][at];
  return words;
}

// total[16] += the sums of a section: high bytes count 256 times, each word 2^-15 of the previous one.
template <typename Part>
void add_fixed_point(const Words& x, const Parameters& parameters, int first_quad, const Part& part, float* total) {
  for (int r = 0; r < 2; ++r) {
    const int quad = first_quad + 2 * r;
    float32x4_t value = vdupq_n_f32(0);
    for (int w = x.count - 1; w >= 0; --w) {
      const int32x4_t sum = vaddq_s32(vshlq_n_s32(part(r, w, 0), 8), part(r, w, 1));
      const float32x4_t product = vfmsq_n_f32(vcvtq_f32_s32(sum), parameters.zero[quad], x.sums[w]);
      value = vfmaq_n_f32(product, value, 1.0f / (1 << kWordShift));
    }
    float* at = total + 4 * quad;
    vst1q_f32(at, vfmaq_f32(vld1q_f32(at), vmulq_n_f32(value, x.scale), parameters.scale[quad]));
  }
}

// total[m][16] += section s and, with groups of 32, s + 1, the other half of the same tile.
void multiply_fixed_point(const Job& job, const uint8_t* weight, int64_t s, const Parameters (&parameters)[2],
                          float* total) {
  const int64_t tile = s * job.section / kTileK, tiles = least(job.fixed_point.chunk_tiles, job.tiles_k - tile);
  constexpr int64_t kXTile = 2 * kTileK;
  const bool halves = job.section < kTileK;
  for (int g = 0; g < 2 * kPairs; g += kPairs) {
    const uint8_t* pairs = weight + tile * kTileBytes + g * kTileK;
    for (int64_t m = 0; m < job.m; ++m) {
      const int64_t chunk = tile / job.fixed_point.chunk_tiles, at = (m * job.tiles_k + tile) * kXTile;
      Dot::Sums<2 * kPairs, 2> words[kMaxWords];
      for (int w = 0; w < job.fixed_point.chunk_words[m * job.fixed_point.chunks + chunk]; ++w) {
        words[w] = multiply<2>(pairs, job.fixed_point.bytes[w] + at, kTileK, kXTile, tiles);
      }
      const auto add = [&](int of, const auto& part) {
        add_fixed_point(words_of(job, m, chunk, s + of), parameters[of], g / kPairs, part, total + m * kTileN);
      };
      if (halves) {
        add(0, [&](int r, int w, int v) { return words[w].template half<0>(r, v); });
        if (s + 1 < job.sections) add(1, [&](int r, int w, int v) { return words[w].template half<1>(r, v); });
      } else {
        add(0, [&](int r, int w, int v) { return words[w].all(r, v); });
      }
    }
  }
}

// Factors of x's zero points: sums of W's codes over section s and, with groups of 32, s + 1, by quad of rows.
struct SumsOfCodes {
  int32x4_t sum[2][kQuads];
};

// Calls visit(of, quad, sums(r, v)) for section s + `of` and rows 4 quad .. 4 quad + 3; r is 0, then 1.
template <typename Sums, typename Visit>
__attribute__((always_inline)) inline void each_section(const Job& job, int64_t s, int first_quad, const Sums& sums,
                                                        const Visit& visit) {
  for (int r = 0; r < 2; ++r) {
    if (job.section < kTileK) {
      visit(0, first_quad + 2 * r, [&](int v) { return sums.template half<0>(r, v); });
      if (s + 1 < job.sections) visit(1, first_quad + 2 * r, [&](int v) { return sums.template half<1>(r, v); });
    } else {
      visit(0, first_quad + 2 * r, [&](int v) { return sums.all(r, v); });
    }
  }
}

// Tiles of W in section s.
int64_t tiles_of(const Job& job, int64_t s) {
  return least(divide_up(job.section, kTileK), job.tiles_k - s * job.section / kTileK);
}

// The sums are products with a row of ones.
SumsOfCodes sum_codes(const Job& job, const uint8_t* weight, int64_t s) {
  int8_t ones[kTileK];
  __builtin_memset(ones, 1, sizeof(ones));
  SumsOfCodes codes;
  for (int g = 0; g < 2 * kPairs; g += kPairs) {
    const uint8_t* pairs = weight + s * job.section / kTileK * kTileBytes + g * kTileK;
    each_section(job, s, g / kPairs, multiply<1>(pairs, ones, 0, 0, tiles_of(job, s)),
                 [&](int of, int quad, const auto& part) { codes.sum[of][quad] = part(0); });
  }
  return codes;
}

// total[m][16] += the sections of int8 x, for kM rows.
template <int kM>
void multiply_int8(const Job& job, const uint8_t* weight, int64_t m, int64_t s, const Parameters (&parameters)[2],
                   const SumsOfCodes& codes, float* total) {
  const int64_t tile = s * job.section / kTileK;
  const int8_t* x = job.int8.values + (m * job.tiles_k + tile) * kTileK;
  for (int g = 0; g < 2 * kPairs; g += kPairs) {
    const Dot::Sums<2 * kPairs, kM> sums =
        multiply<kM>(weight + tile * kTileBytes + g * kTileK, x, job.tiles_k * kTileK, kTileK, tiles_of(job, s));
    each_section(job, s, g / kPairs, sums, [&](int of, int quad, const auto& part) {
      for (int i = 0; i < kM; ++i) {
        int32x4_t sum = part(i);
        if (job.x_zeros != nullptr) sum = vmlsq_n_s32(sum, codes.sum[of][quad], job.x_zeros[m + i]);
        const float x_sum = job.x_sums[(m + i) * job.sections + s + of];
        const float32x4_t value = vfmsq_n_f32(vcvtq_f32_s32(sum), parameters[of].zero[quad], x_sum);
        float* at = total + (m + i) * kTileN + 4 * quad;
        vst1q_f32(at, vfmaq_f32(vld1q_f32(at), value, parameters[of].scale[quad]));
      }
    });
  }
}

// Writes y for the N-tile's 16 columns.
void write(const Job& job, int64_t tile, const float* total) {
  for (int q = 0; q < kQuads; ++q) {
    const int64_t n = tile * kTileN + 4 * q, count = job.n - n;
    if (count <= 0) break;
    const float32x4_t bias = job.bias != nullptr ? load_first(job.bias, n, job.bias_dtype, count) : vdupq_n_f32(0);
    for (int64_t m = 0; m < job.m; ++m) {
      const float32x4_t sum = vld1q_f32(total + m * kTileN + 4 * q);
      store_first(job.y, m * job.n + n, job.y_dtype, vfmaq_n_f32(bias, sum, job.x_scales[m * job.x_scale_stride]),
                  count);
    }
  }
}

// section(weight, s, parameters, total) adds section s, and s + 1 if sections are half a tile.
template <typename Section>
void run_int4(const Job& job, int64_t begin, int64_t end, const Section& section) {
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.m * kTileN * int64_t{sizeof(float)}));
  const int64_t step = job.section < kTileK ? 2 : 1;
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t i = 0; i < job.m * kTileN; ++i) total[i] = 0;
    for (int64_t s = 0; s < job.sections; s += step) {
      const Parameters parameters[2] = {load_parameters(job, tile, s),
                                        load_parameters(job, tile, least(s + step - 1, job.sections - 1))};
      section(job.weight + tile * job.tiles_k * kTileBytes, s, parameters, total);
    }
    write(job, tile, total);
  }
}

void run_fixed_point(const Job& job, int64_t begin, int64_t end) {
  run_int4(job, begin, end, [&](const uint8_t* weight, int64_t s, const Parameters(&parameters)[2], float* total) {
    multiply_fixed_point(job, weight, s, parameters, total);
  });
}

// Scales of a group times `factors`, and zero points of 0.
Parameters load_fp4_parameters(const Job& job, int64_t tile, int64_t group, const float32x4_t (&factors)[kQuads]) {
  Parameters parameters;
  for (int q = 0; q < kQuads; ++q) {
    const int64_t at = (tile * job.scale_rows + group) * kTileN + 4 * q;
    parameters.scale[q] = vmulq_f32(load4(job.scales, at, DType::kBFloat16), factors[q]);
    parameters.zero[q] = vdupq_n_f32(0);
  }
  return parameters;
}

// Half of the factors of each row's sums of codes times scales.
void load_fp4_factors(const Job& job, int64_t tile, float32x4_t (&factors)[kQuads]) {
  for (int q = 0; q < kQuads; ++q) {
    float32x4_t divisor = vdupq_n_f32(1);
    if (job.scale_rows > job.groups) {
      const int64_t at = (tile * job.scale_rows + job.groups) * kTileN + 4 * q;
      divisor = vaddq_f32(load4(job.scales, at, DType::kBFloat16), load4(job.scales, at + kTileN, DType::kBFloat16));
      divisor = vaddq_f32(divisor, load4(job.scales, at + 2 * kTileN, DType::kBFloat16));
    }
    factors[q] = vdivq_f32(vdupq_n_f32(0.5f), divisor);
  }
}

// total[m][16] += K-tile `t`, in kGroups groups: 2, or 4 with a Dot that keeps k-steps apart.
template <int kGroups, typename D = Dot>
void multiply_fp4(const Job& job, const uint8_t* weight, int64_t t, const Parameters (&parameters)[kGroups],
                  float* total) {
  constexpr int64_t kXTile = 2 * kTileK;
  for (int g = 0; g < 2 * kPairs; g += kPairs) {
    const uint8_t* pairs = weight + t * kTileBytes + g * kTileK;
    for (int64_t m = 0; m < job.m; ++m) {
      const Words section = words_of(job, m, t, 0);  // zero points are 0, so its sums do not matter
      typename D::template Sums<2 * kPairs, 2> words[kMaxWords];
      for (int w = 0; w < section.count; ++w) {
        const int8_t* x = job.fixed_point.bytes[w] + (m * job.tiles_k + t) * kXTile;
        words[w] = multiply<2, Format::kFp4>(pairs, x, kTileK, kXTile, 1);
      }
      const auto add = [&](int of, const auto& part) {
        add_fixed_point(section, parameters[of], g / kPairs, part, total + m * kTileN);
      };
      if constexpr (kGroups == 2) {
        add(0, [&](int r, int w, int v) { return words[w].template half<0>(r, v); });
        add(1, [&](int r, int w, int v) { return words[w].template half<1>(r, v); });
      } else {
        add(0, [&](int r, int w, int v) { return words[w].template step<0>(r, v); });
        add(1, [&](int r, int w, int v) { return words[w].template step<1>(r, v); });
        add(2, [&](int r, int w, int v) { return words[w].template step<2>(r, v); });
        add(3, [&](int r, int w, int v) { return words[w].template step<3>(r, v); });
      }
    }
  }
}

template <int kGroups>
void run_fp4(const Job& job, int64_t begin, int64_t end) {
  float* total = static_cast<float*>(scratch(Scratch::kSums, job.m * kTileN * int64_t{sizeof(float)}));
  for (int64_t tile = begin; tile < end; ++tile) {
    for (int64_t i = 0; i < job.m * kTileN; ++i) total[i] = 0;
    float32x4_t factors[kQuads];
    load_fp4_factors(job, tile, factors);
    for (int64_t t = 0; t < job.tiles_k; ++t) {
      Parameters parameters[kGroups];
      for (int i = 0; i < kGroups; ++i) {
        parameters[i] = load_fp4_parameters(job, tile, least(t * kGroups + i, job.groups - 1), factors);
      }
      multiply_fp4<kGroups>(job, job.weight + tile * job.tiles_k * kTileBytes, t, parameters, total);
    }
    write(job, tile, total);
  }
}

void run_int8(const Job& job, int64_t begin, int64_t end) {
  run_int4(job, begin, end, [&](const uint8_t* weight, int64_t s, const Parameters(&parameters)[2], float* total) {
    const SumsOfCodes codes = job.x_zeros != nullptr ? sum_codes(job, weight, s) : SumsOfCodes{};
    int64_t m = 0;
    for (; m + 2 <= job.m; m += 2) multiply_int8<2>(job, weight, m, s, parameters, codes, total);
    if (m < job.m) multiply_int8<1>(job, weight, m, s, parameters, codes, total);
  });
}

}  // namespace
}  // namespace qao::cpu
