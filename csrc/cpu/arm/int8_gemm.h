// W8A8 GEMM for every instruction set: lanes along K, four rows of W by up to four of x.
// `Dot` provides the instructions (lane_dot.h).
#pragma once

#include "cpu/arm/simd.h"
#include "cpu/gemm/job.h"
#include "cpu/parallel.h"
#include "cpu/scratch.h"

namespace qao::cpu {
namespace {

constexpr int kRowsW = 4, kRowsX = 4;
constexpr int kStep = 16;  // columns at a time

// out[kM][16]: integer sums over columns [begin, end). x is padded.
template <int kM>
void multiply(const uint8_t* const (&rows)[kRowsW], const int8_t* x, int64_t x_row, int64_t begin, int64_t end,
              int32_t* out) {
  Dot::Sums<kRowsW, kM> sums;
  const auto add = [&](const uint8_t* const(&at)[kRowsW], int64_t offset, int64_t k) __attribute__((always_inline)) {
    int8x16_t w[kRowsW], bytes[kM];
#pragma GCC unroll 4
    for (int r = 0; r < kRowsW; ++r) w[r] = vreinterpretq_s8_u8(vld1q_u8(at[r] + offset));
#pragma GCC unroll 4
    for (int i = 0; i < kM; ++i) bytes[i] = vld1q_s8(x + i * x_row + k);
    sums.add(w, bytes);
  };
  int64_t k = begin;
  for (; k + kStep <= end; k += kStep) add(rows, k, k);
  if (k < end) {
    uint8_t padded[kRowsW][kStep] = {};
    for (int r = 0; r < kRowsW; ++r) __builtin_memcpy(padded[r], rows[r] + k, static_cast<size_t>(end - k));
    const uint8_t* const last[kRowsW] = {padded[0], padded[1], padded[2], padded[3]};
    add(last, 0, k);
  }
  for (int i = 0; i < kM; ++i) vst1q_s32(out + i * kTileRows, sums.all(0, i));
}

// Writes y for columns n .. n + 3, from the sums over k of x's integers times W's. The contribution of x's zero point
// is subtracted from integers, in float64: both may be thousands of times larger than the difference.
void write(const Job& job, int64_t n, const double* totals) {
  const int64_t count = job.n - n;
  const float32x4_t bias = job.bias != nullptr ? load_first(job.bias, n, job.bias_dtype, count) : vdupq_n_f32(0);
  const float32x4_t scales = job.weight_scaling == Scaling::kRow ? load_first(job.scales, n, DType::kFloat32, count)
                                                                 : vdupq_n_f32(*static_cast<const float*>(job.scales));
  float64x2_t low = vdupq_n_f64(0), high = low;  // sums of W's integers, exact below 2^22
  if (job.x_zeros != nullptr) {
    const float32x4_t w_sums = load_first(job.weight_sums, n, DType::kFloat32, count);
    const float32x4_t integers = vrndnq_f32(vdivq_f32(w_sums, scales));
    low = vcvt_f64_f32(vget_low_f32(integers)), high = vcvt_high_f64_f32(integers);
  }
  for (int64_t m = 0; m < job.m; ++m) {
    float64x2_t first = vld1q_f64(totals + m * kTileRows), second = vld1q_f64(totals + m * kTileRows + 2);
    if (job.x_zeros != nullptr) {
      const float64x2_t zero = vdupq_n_f64(job.x_zeros[m]);
      first = vfmsq_f64(first, low, zero), second = vfmsq_f64(second, high, zero);
    }
    const float32x4_t sum = vmulq_f32(vcombine_f32(vcvt_f32_f64(first), vcvt_f32_f64(second)), scales);
    store_first(job.y, m * job.n + n, job.y_dtype, vfmaq_n_f32(bias, sum, job.x_scales[m * job.x_scale_stride]), count);
  }
}

void run_int8(const Job& job, int64_t begin, int64_t end) {
  const int64_t count = job.m * kTileRows, x_row = job.tiles_k * kTileColumns;
  int32_t* sums = static_cast<int32_t*>(scratch(Scratch::kSums, count * int64_t{sizeof(int32_t) + sizeof(double)}));
  double* totals = reinterpret_cast<double*>(sums + count);
  for (int64_t n = begin * kTileRows; n < end * kTileRows; n += kTileRows) {
    for (int64_t s = 0; s < job.sections; ++s) {
      const int64_t k = s * job.section, k_end = least(k + job.section, job.k);
      for (int quad = 0; quad < kTileRows; quad += kRowsW) {
        const uint8_t* w[kRowsW];  // past N the last row again; its results are not written
        for (int r = 0; r < kRowsW; ++r) w[r] = job.weight + least(n + quad + r, job.n - 1) * job.k;
        int64_t m = 0;
        for (; m + kRowsX <= job.m; m += kRowsX) {
          multiply<kRowsX>(w, job.int8.values + m * x_row, x_row, k, k_end, sums + m * kTileRows + quad);
        }
        for (; m < job.m; ++m)
          multiply<1>(w, job.int8.values + m * x_row, x_row, k, k_end, sums + m * kTileRows + quad);
      }
      for (int64_t i = 0; i < count; i += 2) {
        const float64x2_t sum = vcvtq_f64_s64(vmovl_s32(vld1_s32(sums + i)));
        vst1q_f64(totals + i, s == 0 ? sum : vaddq_f64(vld1q_f64(totals + i), sum));
      }
    }
    for (int quad = 0; quad < kTileRows && n + quad < job.n; quad += kRowsW) write(job, n + quad, totals + quad);
  }
}

}  // namespace
}  // namespace qao::cpu
